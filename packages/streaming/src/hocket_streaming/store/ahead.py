class Ahead:
    def __init__(self, chunks, limit):
        pass

    def want(self, numbers):
        pass
