"""Words of many files, counted file by file."""

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

WORDS = ["lorem", "ipsum", "dolor", "sit", "amet"]


def count_words(path):
    return Counter(path.read_text().split())


def main(folder):
    for number in range(12):
        text = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(500))
        (folder / f"{number}.txt").write_text(text)
    total = Counter()
    with ProcessPoolExecutor(max_workers=2) as executor:
        for counts in executor.map(count_words, sorted(folder.glob("*.txt"))):
            total.update(counts)
    for word, count in sorted(total.items()):
        print(word, count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
