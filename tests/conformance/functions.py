"""What the official conformance suite calls: tools, prompts and resources by the names that it knows them by."""

import asyncio
import base64
import json
import time
from typing import Any

from callyard import (
    Audio,
    CallError,
    File,
    Image,
    Message,
    ToolError,
    aelicit,
    alist_roots,
    asample,
    elicit,
    function,
    list_roots,
    log,
    progress,
    prompt,
    resource,
    sample,
)

RED_DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SILENCE = (
    b"RIFF\x26\x00\x00\x00WAVEfmt \x10\x00\x00\x00"
    + bytes.fromhex("01000100401f0000803e000002001000")
    + b"data\x02\x00\x00\x00\x00\x00"
)
NAME_FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


# --- tools: what they return ----------------------------------------------------------------------------------------


@function(read_only=True)
def test_simple_text() -> str:
    """A text."""
    return "This is a simple text response for testing."


@function(read_only=True)
def test_image_content() -> Image:
    """An image."""
    return Image(RED_DOT)


@function(read_only=True)
def test_audio_content() -> Audio:
    """A sound."""
    return Audio(SILENCE, "audio/wav")


@function(read_only=True)
def test_embedded_resource() -> File:
    """A resource, embedded."""
    return File(b"This is an embedded resource content.", "text/plain", uri="test://embedded-resource")


@function(read_only=True)
def test_multiple_content_types() -> list[str | Image | File]:
    """A text, an image and a resource."""
    data = json.dumps({"test": "data", "value": 123}).encode()
    return [
        "Multiple content types test:",
        Image(RED_DOT),
        File(data, "application/json", uri="test://mixed-content-resource"),
    ]


@function
def test_error_handling() -> str:
    """An error of its own."""
    raise ToolError("This tool intentionally returns an error for testing")


@function(
    input_schema={
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    }
)
def json_schema_2020_12_tool(
    name: str = "",
    address: dict[str, str] | None = None,
    contactMethod: str = "",
    phone: str = "",
    email: str = "",
) -> str:
    """Its schema is the author's own."""
    return f"{name}, {contactMethod}: {phone or email}, {address}"


@function(
    input_schema={
        "type": "object",
        "properties": {
            "region": {"type": "string", "x-mcp-header": "Region"},
            "priority": {"type": "integer", "x-mcp-header": "Priority"},
            "verbose": {"type": "boolean", "x-mcp-header": "Verbose"},
            "query": {"type": "string"},
        },
        "required": ["region", "query"],
    }
)
def test_custom_header_server(
    region: str,
    query: str,
    priority: int = 0,  # noqa: PT028
    verbose: bool = False,  # noqa: PT028
) -> str:
    """Some arguments stand in headers too."""
    return f"{region} {priority} {verbose}: {query}"


# --- tools: what they tell meanwhile --------------------------------------------------------------------------------


@function
def test_tool_with_logging() -> str:
    """Three log messages."""
    log("Tool execution started")
    time.sleep(0.05)
    log("Tool processing data")
    time.sleep(0.05)
    log("Tool execution completed")
    return "logged three messages"


@function
def test_logging_tool() -> str:
    """Log messages that go out only where they were asked for."""
    log("a message that nobody asked for")
    return "logged"


@function
def test_trigger_tool_change() -> str:
    """Whoever runs the suite adds a tool when this was called."""
    return "asked for"


@function
def test_trigger_prompt_change() -> str:
    """As above, a prompt."""
    return "asked for"


@function
def test_tool_with_progress() -> str:
    """Progress, three times."""
    for done in (0, 50, 100):
        progress(done, 100)
        time.sleep(0.1)
    return "done"


# --- tools: what they ask -------------------------------------------------------------------------------------------


@function
def test_sampling(prompt: str) -> str:
    """Asks the client's model."""
    return f"LLM response: {sample(prompt, max_tokens=100).text}"


@function
def test_elicitation(message: str) -> str:
    """Asks the person."""
    text = {"type": "string", "description": "User's response"}
    answer = elicit(
        message,
        {
            "type": "object",
            "properties": {"username": text, "email": {"type": "string", "description": "User's email address"}},
            "required": ["username", "email"],
        },
    )
    return f"User response: {answer.action}, content: {answer.value}"


@function
def test_elicitation_sep1034_defaults() -> str:
    """A form with defaults."""
    answer = elicit(
        "Please check these",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "default": "John Doe"},
                "age": {"type": "integer", "default": 30},
                "score": {"type": "number", "default": 95.5},
                "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
                "verified": {"type": "boolean", "default": True},
            },
        },
    )
    return f"Elicitation completed: action={answer.action}, content={answer.value}"


@function
def test_elicitation_sep1330_enums() -> str:
    """A form with every kind of choice."""
    titled = [{"const": "value1", "title": "First Option"}, {"const": "value2", "title": "Second Option"}]
    options = ["option1", "option2", "option3"]
    answer = elicit(
        "Please choose",
        {
            "type": "object",
            "properties": {
                "untitledSingle": {"type": "string", "enum": options},
                "titledSingle": {"type": "string", "oneOf": titled},
                "legacyEnum": {
                    "type": "string",
                    "enum": ["opt1", "opt2", "opt3"],
                    "enumNames": ["Option One", "Option Two", "Option Three"],
                },
                "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
                "titledMulti": {"type": "array", "items": {"anyOf": titled}},
            },
        },
    )
    return f"Elicitation completed: action={answer.action}, content={answer.value}"


@function
def test_missing_capability() -> str:
    """Needs a model to ask."""
    return sample("Say hello", max_tokens=10).text


@function
def test_streaming_elicitation() -> str:
    """Asks while its answer streams."""
    progress(1, 2)
    return str(elicit("Go on?", {"type": "object", "properties": {"ok": {"type": "boolean"}}}).action)


@function
def test_input_required_result_elicitation() -> str:
    """One question to the person."""
    answer = elicit("What is your name?", NAME_FORM, name="user_name")
    return f"Hello, {answer.value['name'] if answer.value else 'stranger'}!"


@function
def test_input_required_result_sampling() -> str:
    """One question to the model."""
    return sample("What is the capital of France?", max_tokens=100, name="capital_question").text


@function
def test_input_required_result_list_roots() -> str:
    """Asks for the client's folders."""
    return ", ".join(root.uri for root in list_roots(name="client_roots"))


@function
def test_input_required_result_request_state() -> str:
    """What it knows stays with it between the rounds."""
    known = "state-ok"
    answer = elicit("Please confirm", {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    return f"{known}: {answer.value}"


@function
async def test_input_required_result_multiple_inputs() -> str:
    """Three questions at once."""
    person, greeting, roots = await asyncio.gather(
        aelicit("What is your name?", NAME_FORM, name="user_name"),
        asample("Generate a greeting", max_tokens=50, name="greeting"),
        alist_roots(name="client_roots"),
    )
    return f"{person.value} {greeting.text} {roots}"


@function
def test_input_required_result_multi_round() -> str:
    """Two questions, one after the other."""
    name = elicit("Step 1: What is your name?", NAME_FORM, name="step1")
    color = elicit(
        "Step 2: What is your favorite color?",
        {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]},
        name="step2",
    )
    return f"{name.value} likes {color.value}"


@function
def test_input_required_result_tampered_state() -> str:
    """Its state is sealed, as every state is."""
    return str(elicit("Please confirm", {"type": "object", "properties": {"ok": {"type": "boolean"}}}).action)


@function
def test_input_required_result_capabilities() -> str:
    """Asks whoever can be asked."""
    try:
        return str(elicit("What is your name?", NAME_FORM).value)
    except CallError:  # nobody there: the model may know
        return sample("What may the person be called?", max_tokens=10).text


# --- prompts --------------------------------------------------------------------------------------------------------


@prompt
def test_simple_prompt() -> str:
    """A text."""
    return "This is a simple prompt for testing."


@prompt(complete={"arg1": ["paris", "park", "party", "test", "testing"]})
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """Two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@prompt
def test_prompt_with_embedded_resource(resourceUri: str) -> list[Any]:
    """A resource in a message."""
    return [
        File(b"Embedded resource content for testing.", "text/plain", uri=resourceUri),
        "Please process the embedded resource above.",
    ]


@prompt
def test_prompt_with_image() -> list[Any]:
    """An image in a message."""
    return [Message("user", Image(RED_DOT)), "Please analyze the image above."]


@prompt
def test_input_required_result_prompt() -> str:
    """Asks before it says anything."""
    form = {"type": "object", "properties": {"context": {"type": "string"}}, "required": ["context"]}
    answer = elicit("What context should the prompt use?", form, name="user_context")
    return f"Use this context: {answer.value}"


# --- resources ------------------------------------------------------------------------------------------------------


@resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """A text."""
    return "This is the content of the static text resource."


@resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """An image."""
    return RED_DOT


@resource("test://watched-resource", mime_type="text/plain")
def watched_resource() -> str:
    """One that clients subscribe to."""
    return "watched"


@resource("test://template/{id}/data", mime_type="application/json")
def template_data(id: str) -> dict[str, Any]:
    """One for each id."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}
