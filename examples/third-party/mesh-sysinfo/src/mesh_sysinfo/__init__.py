"""`mesh sysinfo`: what a machine has, as far as placing processes on it is concerned."""
