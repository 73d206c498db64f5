"""Requests of OpenAI's protocol: every field is served, ignored because it cannot change the answer, or refused.

A field that is not listed here is refused. docs/serve.md prints the tables.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SEED = 2**63
MOST_TEXTS = 16
"""Most answers to one prompt."""
MOST_PROMPTS = 256
MOST_STOPS = 64
BLOCKED_ARGUMENTS = frozenset(
    "self chat_template tokenize messages conversation tools documents add_generation_prompt continue_final_message "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of `apply_chat_template` that are not the template's own."""
COMMON_IGNORED = {
    "user": "names the user",
    "metadata": "is kept for nobody",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "safety_identifier": "names the user",
    "prompt_cache_key": "beginnings are found by their tokens",
    "prompt_cache_retention": "the least recently used beginnings leave first",
}


class Bad(ValueError):
    """A mistake of the client.

    Attributes:
        status: of HTTP.
        field: that is at fault, if one is.
    """

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


class Closed(BaseModel):
    """An object without other fields than its own. Null is the same as no field, known or not: clients send back all
    that they know of.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: each for name, each in value.items() if each is not None or name in needed}


class StreamOptions(Closed):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Closed):
    """Fields that all requests for an answer have.

    Of the fields that sample, null means what the model's generation_config.json says.
    """

    IGNORED: ClassVar[dict[str, str]] = {}
    REFUSED: ClassVar[dict[str, str]] = {}

    model: str | None = Field(None, description="the served model's name, or null")
    stream: bool | None = Field(None, description="the answer in server-sent events, the last of which is [DONE]")
    stream_options: StreamOptions | None = Field(None, description="include_usage: tokens in a last chunk of its own")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy, above 0 samples")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="samples")
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="samples; 0 and -1 are all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="samples")
    seed: Annotated[int, Field(ge=-SEED, lt=SEED)] | None = Field(None, description="of this request alone")
    stop: str | list[str] | None = Field(None, description="ends the answer, which does not contain it")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="by the answer's tokens")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="by the answer's tokens")
    repetition_penalty: Annotated[float, Field(gt=0)] | None = Field(None, description="by all tokens so far")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="numbers to add to logits, by token id"
    )
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] | None = Field(None, description="answers to each prompt")
    cache_prompt: bool | None = Field(None, description="false reads the whole prompt, and keeps nothing")

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_nothing(cls, value: Any) -> Any:
        """Leaves out refused fields that switch nothing on: clients send defaults such as `background: false`."""
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name not in cls.REFUSED or not asks_nothing(each)}

    @field_validator("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
                     mode="before")  # fmt: skip
    @classmethod
    def _whole_numbers_too(cls, value: Any) -> Any:
        return float(value) if type(value) is int else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _whole_biases_too(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {token: float(bias) if type(bias) is int else bias for token, bias in value.items()}

    @field_validator("stop")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value or []
        if "" in stops:
            raise ValueError("a stop string is empty, and would end every answer at once")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"more than {MOST_STOPS} stop strings")
        return stops

    @classmethod
    def parse(cls, body: bytes) -> Any:
        """Reads a request.

        Raises:
            Bad: it is no request of this kind; names the field.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise cls._bad(error, body) from None

    @classmethod
    def _bad(cls, error: ValidationError, body: bytes) -> Bad:
        """Returns what is told of the first mistake. Where several types may stand each has errors of its own: what
        the client meant is too long or too short alone, or goes wrong deepest within the value.
        """
        whole = json.loads(body)
        found = [(place_of(each, whole), each) for each in error.errors(include_url=False)]
        first = found[0][0]
        within = [(place, each) for place, each in found if place[: len(first)] == first]
        sized = [(place, each) for place, each in within if each["type"] in ("too_long", "too_short")]
        within = sized or within
        deepest, chosen = max(within, key=lambda pair: len(pair[0]))
        place = ".".join(map(str, deepest))
        name = str(deepest[0]) if deepest else None
        if chosen["type"] == "extra_forbidden":
            why = cls.REFUSED.get(place, "not a field of this request")
            return Bad(f"{place}: {why}; leave it out", name)
        messages = dict.fromkeys(each["msg"].removeprefix("Value error, ") for at, each in within if at == deepest)
        message = ", or ".join(messages).replace(", or Input should be", " or")
        return Bad(f"{place}: {message}" if place else message, name)


def asks_nothing(value: Any) -> bool:
    return value is False or value in ("", [], {})


def place_of(error: Any, body: Any) -> tuple[str | int, ...]:
    """Returns where in a body an error is: pydantic's place without the names of types."""
    place: list[str | int] = []
    for part in error["loc"]:
        if isinstance(body, dict) and part in body:
            body = body[part]
        elif isinstance(body, list) and isinstance(part, int):
            body = body[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


class TextPart(Closed):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: Any = None  # beginnings are found by their tokens


class CalledFunction(Closed):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Closed):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Closed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None  # of an answer that is sent back


class FunctionTool(Closed):
    type: Literal["function"]
    function: dict[str, Any]


class JsonSchema(Closed):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampled):
    """A request to /v1/chat/completions."""

    IGNORED = COMMON_IGNORED | {
        "parallel_tool_calls": "the model alone decides how many it writes",
        "verbosity": "is for other models",
        "reasoning_effort": "is for other models: a template's own switch goes into chat_template_kwargs",
    }
    REFUSED = {
        "functions": "tools have taken its place",
        "function_call": "tool_choice has taken its place",
        "modalities": "there are texts alone",
        "audio": "there are texts alone",
        "prediction": "drafts are not taken",
        "web_search_options": "nothing is searched",
        "generation_config": "each of its settings is a field",
    }

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="texts, also in parts of type text; calls of tools and their results"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="most tokens of an answer")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="the same")
    logprobs: bool | None = Field(None, description="logarithms of the tokens' probabilities before sampling")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="those of the likeliest tokens")
    tools: list[FunctionTool] | None = Field(None, description="given to the chat template")
    tool_choice: Literal["auto", "none"] | None = Field(None, description="none gives no tools to the template")
    response_format: ResponseFormat | None = Field(None, description="text, or JSON of any or of a given schema")
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _own_variables(cls, value: Any) -> Any:
        for name in value or {}:
            if name in BLOCKED_ARGUMENTS:
                raise ValueError(f"{name} is no variable of the template")
        return value

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Number of likeliest tokens to report; None without logarithms."""
        return (self.top_logprobs or 0) if self.logprobs else None


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(Sampled):
    """A request to /v1/completions."""

    IGNORED = COMMON_IGNORED
    REFUSED = {"suffix": "a text is continued at its end alone", "generation_config": "each of its settings is a field"}

    prompt: str | Ids | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)] | Annotated[
        list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)
    ] = Field(description="a text, token ids, or a list of either")  # fmt: skip
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="most tokens of an answer; 0 only with echo"
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="logarithms of the probabilities of tokens and of so many likeliest ones; with echo, the "
        "prompt's under full attention, by which it is read"
    )  # fmt: skip
    echo: bool | None = Field(None, description="the answer begins with the prompt")
    best_of: Literal[1] | None = Field(None, description="1")

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs


def without_ignored(kind: type[Sampled], body: bytes) -> bytes:
    """Returns a request without the fields that cannot change its answer.

    Raises:
        Bad: the body is no JSON object.
    """
    try:
        fields = json.loads(body)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Bad(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Bad("the body is no JSON object")
    kept = {name: value for name, value in fields.items() if name not in kind.IGNORED}
    try:
        return json.dumps(kept, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Bad("a text holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise Bad("the body is nested too deeply") from None


def read(kind: type[Sampled], body: bytes) -> Any:
    """Reads a request; raises Bad, which names the field that is at fault."""
    return kind.parse(without_ignored(kind, body))


def tables() -> str:
    """Returns the table of fields of both requests in Markdown, for docs/serve.md."""
    lines = []
    for path, kind in (("chat/completions", ChatRequest), ("completions", CompletionRequest)):
        lines += [f"**/v1/{path}**", "", "| field | |", "|---|---|"]
        for name, field in kind.model_fields.items():
            lines.append(f"| `{name}` | served: {field.description} |")
        lines += [f"| `{name}` | ignored: {why} |" for name, why in kind.IGNORED.items()]
        lines += [f"| `{name}` | refused: {why} |" for name, why in kind.REFUSED.items()]
        lines += ["| others | refused |", ""]
    return "\n".join(lines)
