"""`python3 -m verl.trainer.main_generation_server`: answer every prompt of a data file."""

from verl.commands.generate_answers import main
from verl.utils.process_end import end_process

if __name__ == "__main__":
    end_process(main)
