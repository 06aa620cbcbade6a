"""The files of the dashboard's page."""
