RATES = {"basic": 900}
