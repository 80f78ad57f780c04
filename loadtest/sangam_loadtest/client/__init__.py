"""The open-loop client: sends a schedule of requests over HTTP and writes what became of each."""
