"""What puts the server to work; `python -m deploy.demo` is `make run`."""
