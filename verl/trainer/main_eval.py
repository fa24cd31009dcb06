"""`python3 -m verl.trainer.main_eval`: score a file of answers."""

from verl.commands.score_answers import main
from verl.utils.process_end import end_process

if __name__ == "__main__":
    end_process(main)
