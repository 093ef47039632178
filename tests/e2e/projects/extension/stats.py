import numpy as np


def mean(values: list[float]) -> float:
    return np.asarray(values).mean()
