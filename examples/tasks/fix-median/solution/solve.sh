#!/bin/sh
cat > median.py <<'END'
import sys


def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(2)
    print(median([float(text) for text in sys.argv[1:]]))
END
