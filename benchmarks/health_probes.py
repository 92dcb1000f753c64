"""How long servers take to answer a small GET, one after another; percentiles as JSON, in milliseconds.

Run it in a process of its own beside the load, so that nothing else delays its clock:

    python benchmarks/health_probes.py http://127.0.0.1:8000/health --probes 1000
"""

import argparse
import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="+", help="asked in turns")
    parser.add_argument("--probes", type=int, default=1000, help="of each, at most")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two turns")
    parser.add_argument("--until", type=Path, help="stop when this file is there")
    options = parser.parse_args()

    parts = [urlsplit(url) for url in options.urls]
    connections = [http.client.HTTPConnection(part.netloc, timeout=60) for part in parts]
    took_ns: list[list[int]] = [[] for _ in parts]
    for _ in range(options.probes):
        if options.until is not None and options.until.exists():
            break
        for part, connection, own in zip(parts, connections, took_ns, strict=True):
            start_ns = time.monotonic_ns()
            connection.request("GET", part.path or "/")
            response = connection.getresponse()
            response.read()
            own.append(time.monotonic_ns() - start_ns)
            if response.status != 200:
                raise SystemExit(f"{part.geturl()} answers {response.status}")
        time.sleep(options.pause)
    print(json.dumps({url: shown(own) for url, own in zip(options.urls, took_ns, strict=True)}))


def shown(took_ns: list[int]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum."""
    p50, p99, most = np.percentile(np.array(took_ns) / 1e6, [50, 99, 100])
    return {
        "probes": len(took_ns),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "max_ms": round(most, 2),
    }


if __name__ == "__main__":
    main()
