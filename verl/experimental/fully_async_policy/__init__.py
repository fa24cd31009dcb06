"""Import path of fully asynchronous training; its program is `fully_async_main`."""

from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
