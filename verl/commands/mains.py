"""Commands that load libraries for seconds: help and mistakes in the arguments come before that."""

from collections.abc import Sequence

from verl.commands.parsers import data_options, merge_options, reward_options, template_options


def merge_main(argv: Sequence[str] | None = None) -> int:
    """`verl merge`, whose arguments are read first."""
    merge_options(argv)
    from verl.commands.merge import main

    return main(argv)


def template_main(argv: Sequence[str] | None = None) -> int:
    """`verl check-template`, whose arguments are read first."""
    template_options(argv)
    from verl.commands.check_template import main

    return main(argv)


def data_main(argv: Sequence[str] | None = None) -> int:
    """`verl check-data`, whose arguments are read first."""
    data_options(argv)
    from verl.commands.check_data.command import main

    return main(argv)


def reward_main(argv: Sequence[str] | None = None) -> int:
    """`verl check-reward`, whose arguments are read first."""
    reward_options(argv)
    from verl.commands.check_reward.command import main

    return main(argv)
