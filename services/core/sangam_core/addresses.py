"""Hosts and ports as URLs have them. Called by whoever says where it listens."""


def http_url(host: str, port: int) -> str:
    """``http://10.0.0.7:20001``; an IPv6 address stands in brackets: ``http://[fd00::7]:20001``."""
    return f"http://{host_and_port(host, port)}"


def host_and_port(host: str, port: int) -> str:
    """What stands for both in URLs and in errors."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
