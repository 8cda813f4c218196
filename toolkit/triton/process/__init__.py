"""What is started: a `tritonserver` process on this machine, watched and cleaned up after."""
