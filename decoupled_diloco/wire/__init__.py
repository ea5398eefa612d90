"""Between the core's types and the generated messages: values, streams of bytes, errors."""
