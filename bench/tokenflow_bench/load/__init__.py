"""The load bench: an open loop of readers on real sockets, against any OpenAI-compatible endpoint."""
