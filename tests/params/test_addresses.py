"""Addresses of servers: what an address may hold, and where a key may travel."""

import pytest

from params.schema.addresses import check_endpoint, check_key_travels_safely


def test_a_key_travels_encrypted_or_not_at_all():
    with pytest.raises(ValueError, match="plain text"):
        check_key_travels_safely("http://models.example.org/v1", "A_KEY")
    check_key_travels_safely("https://models.example.org/v1", "A_KEY")
    check_key_travels_safely("http://127.0.0.1:8000/v1", "A_KEY")
    check_key_travels_safely("http://models.example.org/v1", None)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:word@models.example.org/v1",
        "https://models.example.org/v1?key=word",
        "https://models.example.org/v1#word",
    ],
)
def test_an_address_holds_no_secret(url):
    with pytest.raises(ValueError, match="key_variable") as caught:
        check_endpoint(url)
    assert "word" not in str(caught.value).replace("password", "")
