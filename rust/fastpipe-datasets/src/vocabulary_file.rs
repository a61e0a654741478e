//! Vocabulary files.

use std::io::Read;

use fastpipe_batch::{Error, ErrorKind, Result, Vocabulary, text_path, try_with_capacity};
use fastpipe_files::{Halt, OnProgress};

/// Number of keys between two checks whether the user wants to stop.
pub const LOOK_AFTER_KEYS: usize = 1 << 16;

/// Reads the keys of a text file, one per line. Calls `on_progress` from time to time with the number of keys.
///
/// # Errors
/// Errors of storage or memory; a duplicate key; a file that is compressed or has more than 2^32 keys; any error of
/// `on_progress`.
pub fn read_vocabulary<E>(path: &str, on_progress: &mut OnProgress<'_, E>) -> Result<Vocabulary, Halt<E>> {
    let own = text_path(path);
    let io = |error: std::io::Error| Error::io(path, &error);
    let found = std::fs::metadata(&own).map_err(io)?;
    if !found.is_file() {
        let reason = "expected a text file with one key per line, found a directory or a device";
        return Err(Error::new(ErrorKind::Storage, reason).at_path(path).into());
    }
    let mut file = std::fs::File::open(&own).map_err(io)?;
    let size = usize::try_from(found.len()).unwrap_or(usize::MAX);
    let text = try_with_capacity(size.saturating_add(1), "the text of a vocabulary");
    let mut text = text.map_err(|error| error.at_path(path))?;
    file.read_to_end(&mut text).map_err(io)?;
    table(&text, on_progress).map_err(|halt| match halt {
        Halt::Failed(error) => Halt::Failed(error.at_path(path)),
        interrupted @ Halt::Interrupted(_) => interrupted,
    })
}

fn table<E>(text: &[u8], on_progress: &mut OnProgress<'_, E>) -> Result<Vocabulary, Halt<E>> {
    let malformed = |reason: String| Err(Error::new(ErrorKind::Malformed, reason).into());
    for (start, what) in [
        (
            &b"\xef\xbb\xbf"[..],
            "begins with a byte order mark: write it without one",
        ),
        (b"\x1f\x8b", "is compressed by gzip: decompress it first"),
    ] {
        if text.starts_with(start) {
            return malformed(format!("expected a vocabulary, one key per line; the file {what}"));
        }
    }
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let lines = || text.split(|&byte| byte == b'\n');
    let mut table = Vocabulary::with_capacity(lines().count(), text.len())?;
    if text.is_empty() {
        return Ok(table);
    }
    for (number, line) in lines().enumerate() {
        if number % LOOK_AFTER_KEYS == 0 {
            on_progress(number as u64).map_err(Halt::Interrupted)?;
        }
        let Ok(index) = u32::try_from(number) else {
            return Err(Error::new(ErrorKind::Limit, "a vocabulary has more than 2^32 keys").into());
        };
        let key = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some(before) = table.push(key, index)? {
            let key = String::from_utf8_lossy(key);
            return malformed(format!(
                "expected each key once, found {key:?} on line {} and on line {}",
                u64::from(before) + 1,
                number + 1
            ));
        }
    }
    Ok(table)
}
