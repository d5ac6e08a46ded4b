"""Tell public IP addresses from those of this machine and its networks."""

from __future__ import annotations

import ipaddress

type Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""What the IPv6 addresses of the internet begin with."""
# Python's newest tables call these private; those of Python 3.12 do not yet. 2001::/23 has Teredo, 2002::/16 is 6to4:
# both carry an IPv4 address. 168.63.129.16 is Azure's WireServer, which hands a machine's secrets to its programs.
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
    )
)
_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)


def parse_address(text: str) -> Address:
    """Return the address, an IPv4 address if IPv6 only wraps one (::ffff:1.2.3.4, or NAT64's 64:ff9b::1.2.3.4).

    Raises ValueError for anything else.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def is_public(address: Address) -> bool:
    """Return whether the address is one of the internet: not private, local, reserved or for many receivers."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_private(address: Address) -> bool:
    """Return whether the address is this machine's or one of a private network.

    Link-local addresses, among them those of clouds' metadata, are neither public nor private here.
    """
    return address.is_loopback or any(address in network for network in _PRIVATE)
