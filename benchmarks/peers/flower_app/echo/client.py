"""The client: reads the arrays and sends them back."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def echo(message: Message, context: Context) -> Message:
    """The arrays that came, as a new record."""
    arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
    return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)
