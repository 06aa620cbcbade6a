"""The process that talks with a Ray cluster; all of it is in ``__main__``, which nothing imports: it needs Ray."""
