"""What is said: the tensors of requests and answers, on both sides of the server."""
