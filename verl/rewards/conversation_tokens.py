"""The tokens that a reward model reads of a prompt with its answer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from verl.data.chat import Message, answer_ending, with_answer
from verl.data.preferences import without_padding
from verl.rewards.base import RewardInput
from verl.utils.errors import ConfigError, RewardError


class ConversationTokens:
    """Token ids of a conversation for a reward model.

    With the policy's tokenizer they are the sampled ones, and what the chat template writes after the end of an answer.
    With `own`, another tokenizer, the conversation is rendered with its template and encoded anew. Trailing padding is
    cut off, as `transformers` passes over it.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase | None, pad_token_id: int | None):
        self.own, self.pad = own, pad_token_id
        self.ending = [] if own is not None else answer_ending(policy)

    def read(self, item: RewardInput) -> Sequence[int]:
        """The tokens of one answer with its prompt."""
        if item.answer is None or item.row is None:
            raise RewardError(f"{item.where or 'an answer'}: a reward model scores answers of a run, not of a file")
        ids = item.answer.tokens.tolist() if self.own is None else self._render(item, item.row.messages, self.own)
        if self.ending and ids[-1] == self.ending[0]:
            ids += self.ending[1:]
        return without_padding(ids, self.pad)

    def _render(self, item: RewardInput, prompt: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(with_answer(prompt, item.solution_str), tokenize=False)
        except Exception as error:  # the template is the model author's code and can raise anything
            raise RewardError(
                f"{item.where or 'an answer'}: the chat template of the reward model refuses it: {error}"
            ) from error
        return list(tokenizer.encode(str(text), add_special_tokens=False))


def other_tokenizer(
    policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, always: bool, where: str
) -> PreTrainedTokenizerBase | None:
    """`own` where it is another tokenizer than the policy's, or `always`; ConfigError where it has no chat template.

    Another tokenizer has another id for a token, or another chat template.
    """
    same = own.get_vocab() == policy.get_vocab() and own.chat_template == policy.chat_template
    if same and not always:
        return None
    if not own.chat_template:
        differs = "input_tokenizer is set" if same else "the policy has another tokenizer"
        raise ConfigError(
            f"{where}: its tokenizer has no chat template, and {differs}, so that conversations have to be rendered "
            "for it anew; add the chat template that it was trained with to its folder"
        )
    return own
