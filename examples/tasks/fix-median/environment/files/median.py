import sys


def median(numbers):
    numbers.sort(key=str)
    return numbers[len(numbers) // 2]


if __name__ == "__main__":
    print(median([float(text) for text in sys.argv[1:]]))
