"""Placeholder replaced below."""


def save_engine(engine, folder, contents):
    raise NotImplementedError


def load_engine(engine, folder, contents):
    raise NotImplementedError
