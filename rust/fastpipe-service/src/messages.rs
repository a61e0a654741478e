//! Flight's small messages in protobuf: tickets, actions and their results.

/// Returns the tag of a length-delimited field: its number, and wire type 2.
fn tag(field: u64) -> u64 {
    field << 3 | 2
}

pub(crate) fn put_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub(crate) fn put_bytes(bytes: &mut Vec<u8>, field: u64, value: &[u8]) {
    put_varint(bytes, tag(field));
    put_varint(bytes, value.len() as u64);
    bytes.extend_from_slice(value);
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// Returns the fields of a message; `None` if it is invalid. All fields must be length-delimited.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let len = usize::try_from(varint(&mut message)?).ok()?;
        if key & 7 != 2 {
            return None;
        }
        let (value, rest) = message.split_at_checked(len)?;
        found.push((key >> 3, value));
        message = rest;
    }
    Some(found)
}

/// Returns the last field with this number, or an empty slice if it is absent. `None` if the message is invalid.
pub(crate) fn bytes_field(message: &[u8], field: u64) -> Option<&[u8]> {
    let last = fields(message)?.into_iter().rev().find(|&(number, _)| number == field);
    Some(last.map_or(&[], |(_, value)| value))
}

/// Returns the kind and body of an action.
pub(crate) fn action(message: &[u8]) -> Option<(&str, &[u8])> {
    let kind = std::str::from_utf8(bytes_field(message, 1)?).ok()?;
    Some((kind, bytes_field(message, 2)?))
}

/// Encodes a result of an action.
pub(crate) fn result(body: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(body.len() + 8);
    put_bytes(&mut message, 1, body);
    message
}

/// Encodes the name and the description of an action.
pub(crate) fn action_type(name: &str, text: &str) -> Vec<u8> {
    let mut message = Vec::new();
    put_bytes(&mut message, 1, name.as_bytes());
    put_bytes(&mut message, 2, text.as_bytes());
    message
}
