"""`python -m verl.model_merger`: the same as `verl merge`."""

from verl.commands.mains import merge_main
from verl.utils.errors import VerlError
from verl.utils.process_end import end_process, say_error


def main() -> int:
    """`merge_main`, with the status 1 for a mistake, which is printed."""
    try:
        return merge_main()
    except VerlError as error:
        say_error(f"error: {error}")
        return 1


if __name__ == "__main__":
    end_process(main)
