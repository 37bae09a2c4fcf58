"""From prompts and responses to tokens: the chat template, and where a prompt ends and a response begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ...errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Prompt = str | Messages

MESSAGES = "prompt_messages"
"""The column of prompts as chat messages, where the text of the column `prompt` would not say all of them."""
TEMPLATE_REMEDY = "Give the tokenizer one with model.chat_template, or make the prompt plain text in data.format."


class Renderer:
    """Renders prompts as the model is to see them: as a chat under the tokenizer's template, without one as plain text.

    remedy: what messages say to a tokenizer without a template that is needed.
    Errors: DataError naming the row (`where`) and the remedy.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None = None, remedy: str = TEMPLATE_REMEDY
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._remedy = remedy
        self._template = tokenizer.chat_template is not None
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = tuple({*special, *tokenizer.all_special_tokens})
        if system_prompt is not None and not self._template:
            raise DataError(f"data.system_prompt needs a chat template, and the tokenizer has none. {remedy}")

    def prompt(self, prompt: Prompt, where: str) -> str:
        """The text up to where the model begins to write."""
        if isinstance(prompt, str) and not self._template:
            return prompt
        if not self._template:
            raise DataError(
                f"{where}: the prompt is chat messages, but the tokenizer has no chat template. {self._remedy}"
            )
        return self._render(self.messages(prompt), where, add_generation_prompt=True)

    def response(self, prompt: Prompt, before: str, response: str, where: str) -> str:
        """What follows the prompt's text `before`: the response, and the end of its turn if the template has one."""
        if not self._template:
            return response
        messages = [*self.messages(prompt), {"role": "assistant", "content": response}]
        whole = self._render(messages, where, add_generation_prompt=False)
        if not whole.startswith(before):
            raise DataError(
                f"{where}: the chat template renders prompt and response together as {whole[-80:]!r}, which does not "
                f"begin with the prompt alone, {before[-80:]!r}. Give another template with model.chat_template."
            )
        return whole[len(before) :].rstrip()  # templates put a newline after the turn, which the model need not learn

    def prompt_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of rendered prompts. A template wrote its own special tokens; plain text gets the tokenizer's."""
        return self._tokens(texts, add_special_tokens=not self._template)

    def response_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of responses, apart from their prompts'. Where the text ends in no special token, the tokenizer's
        end-of-sequence token follows."""
        end = self._tokenizer.eos_token_id
        if not isinstance(end, int):
            raise DataError("the tokenizer has no end-of-sequence token, so a response could not say that it ends.")
        tokens = self._tokens(texts, add_special_tokens=False)
        return [ids if self._ended(text) else [*ids, end] for ids, text in zip(tokens, texts, strict=True)]

    def messages(self, prompt: Prompt) -> Messages:
        """The prompt as messages; data.system_prompt comes first where they bring no system message of their own."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _ended(self, text: str) -> bool:
        return self._template and text.endswith(self._special)

    def _render(self, messages: Messages, where: str, *, add_generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses the messages: {error}") from error
        return str(text)

    def _tokens(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        tokens: list[list[int]] = encoded["input_ids"]
        return tokens
