"""Messages to token ids and back, for one model.

In: a model's tokenizer files and conversations. Out: the tokens of a prompt, those that new messages add to a branch,
and what a sampled reply says. A sampled token is never decoded and tokenized again; torch and transformers stay out.
"""

from tailrace.rollouts.chat.rendering import ChatRenderer, Renderer
from tailrace.rollouts.chat.replies import ParsedReply
from tailrace.rollouts.chat.tokenizer import ChatTokenizer

__all__ = ["ChatRenderer", "ChatTokenizer", "ParsedReply", "Renderer"]
