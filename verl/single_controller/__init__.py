"""Import path of the dispatch decorators, which do not exist here. A file, since a left-over folder would import."""

from verl.utils.import_paths import refuse_import

refuse_import(__name__)
