"""Addresses of servers: what an address may hold, and where a key may travel."""

import pytest

from params.schema.addresses import check_endpoint, check_key_travels_safely, is_loopback


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


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1:80", "LOCALHOST", "localhost.:1")),
        *((host, True) for host in ("[::1]:8000", "[::ffff:127.0.0.1]")),
        *(
            (host, False)
            for host in ("localhost.example.org", "10.0.0.1", "[::2]", "128.0.0.1", "")
        ),
    ],
)
def test_what_is_on_this_machine(host, here):
    assert is_loopback(f"http://{host}/v1") is here
