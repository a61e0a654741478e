//! Represents paths as text.
//!
//! Nearly all paths are UTF-8 and are represented as they are. On Unix, a path may contain any bytes except NUL, so a
//! byte that is not valid UTF-8 is written as a NUL and two hexadecimal digits. Different paths always have different
//! texts.

use std::borrow::Cow;
use std::ffi::OsStr;

/// Returns the text of a path.
pub fn path_text(path: &OsStr) -> String {
    match path.to_str() {
        Some(text) if !text.contains('\0') => text.to_owned(),
        _ => escaped(path.as_encoded_bytes()),
    }
}

#[cold]
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    let escape = |text: &mut String, byte: u8| text.push_str(&format!("\0{byte:02x}"));
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\0' => escape(&mut text, 0),
                c => text.push(c),
            }
        }
        chunk.invalid().iter().for_each(|&byte| escape(&mut text, byte));
    }
    text
}

/// Returns the path that a text represents.
#[cfg(unix)]
pub fn text_path(text: &str) -> Cow<'_, OsStr> {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    if !text.contains('\0') {
        return Cow::Borrowed(OsStr::new(text));
    }
    let mut parts = text.split('\0');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let byte = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte {
            Some(byte) => bytes.push(byte),
            None => bytes.extend([0].iter().chain(part.as_bytes())),
        }
        if byte.is_some() {
            bytes.extend_from_slice(&part.as_bytes()[2..]);
        }
    }
    Cow::Owned(OsString::from_vec(bytes))
}

/// Returns the path that a text represents.
#[cfg(not(unix))]
pub fn text_path(text: &str) -> Cow<'_, OsStr> {
    Cow::Borrowed(OsStr::new(text))
}

/// Returns a path's text in a form for people to read.
pub fn shown_path(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\\x"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn every_path_has_a_unique_text() {
        let paths: [&[u8]; 8] = [
            b"",
            b"a/b.avro",
            "ä/😀".as_bytes(),
            b"\xff",
            b"a\xe4b.avro",
            b"\xc3",
            b"\xc3\xa4\xc3x",
            b"a\0ffb",
        ];
        let texts = paths.map(|path| path_text(OsStr::from_bytes(path)));
        for (path, text) in paths.iter().zip(&texts) {
            assert_eq!(text_path(text).as_bytes(), *path);
            assert_eq!(texts.iter().filter(|other| *other == text).count(), 1);
        }
        assert_eq!(texts[..3], ["", "a/b.avro", "ä/😀"]);
        assert_eq!(shown_path(&texts[4]), "a\\xe4b.avro");
        assert_eq!(shown_path(&texts[1]), "a/b.avro");
        // Text that isn't a valid escape is also accepted.
        assert_eq!(text_path("a\0z").as_bytes(), b"a\0z");
    }
}
