"""Requests and answers as the router reads them, and the errors that it answers with."""
