"""A model that is read once in each process, into a global."""

import os
from concurrent.futures import ProcessPoolExecutor

model = None
loads = 0


class Prediction:
    def __init__(self, score):
        self.score = score


def load(path, weight):
    global model, loads
    model = {"path": path, "weight": weight}
    loads += 1


def scale(value):
    return model["weight"] * value


def predict(value):
    assert loads == 1, loads
    return Prediction(scale(value)), os.getpid()


def main():
    with ProcessPoolExecutor(max_workers=2, initializer=load, initargs=("model.bin", 3)) as executor:
        answers = list(executor.map(predict, range(200), chunksize=10))
    print([prediction.score for prediction, _ in answers] == [3 * n for n in range(200)])
    print(all(isinstance(prediction, Prediction) for prediction, _ in answers), model)
    print(os.getpid() not in {pid for _, pid in answers}, 1 <= len({pid for _, pid in answers}) <= 2)


if __name__ == "__main__":
    main()
