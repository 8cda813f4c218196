"""What is written: model repositories for `tritonserver`, and how they are launched elsewhere."""
