import json

import nowhere_under_test


def job(text: str) -> object:
    return nowhere_under_test.run(json.loads(text))
