//! Copies Avro files with another library's reader and writer, for tests that need files not written by fastpipe.
//!
//! Runs until its standard input is closed. Each line requests one file and is answered by one line:
//!
//! ```text
//! IN<TAB>OUT<TAB>CODEC<TAB>BLOCK_BYTES[<TAB>SCHEMA]  ->  ok  |  error: what went wrong
//! ```
//!
//! `CODEC` is `null`, `deflate`, `snappy`, `zstandard`, `bzip2` or `xz`. A block is closed after the record that fills
//! it to `BLOCK_BYTES` bytes, before compression. The order of map entries may change. `SCHEMA` is a reader's schema,
//! in one line of JSON. If it is given, the other library resolves the records to it, and the copy has this schema.

use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};

use apache_avro::{Bzip2Settings, Codec, DeflateSettings, Reader, Schema, Writer, XzSettings, ZstandardSettings};

fn main() -> io::Result<()> {
    let mut answers = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        match rewrite(&line?) {
            Ok(()) => writeln!(answers, "ok")?,
            // An answer is one line, even if the message contains newlines.
            Err(error) => writeln!(answers, "error: {}", error.to_string().replace(['\n', '\r'], " "))?,
        }
        answers.flush()?;
    }
    Ok(())
}

fn rewrite(line: &str) -> Result<(), Box<dyn Error>> {
    let fields: Vec<&str> = line.split('\t').collect();
    let (&[from, to, codec, block_bytes], wanted) = (match &fields[..] {
        [first @ .., wanted] if fields.len() == 5 => (first, Some(Schema::parse_str(wanted)?)),
        all => (all, None),
    }) else {
        return Err(format!("expected 4 or 5 fields with tabs between them, found {}", fields.len()).into());
    };
    let reader = Reader::builder(BufReader::new(File::open(from)?))
        .maybe_reader_schema(wanted.as_ref())
        .build()?;
    let schema = wanted.as_ref().unwrap_or(reader.writer_schema()).clone();
    let mut writer = Writer::builder()
        .schema(&schema)
        .writer(BufWriter::new(File::create(to)?))
        .codec(named(codec)?)
        .block_size(block_bytes.parse()?)
        .build()?;
    for value in reader {
        writer.append_value(value?)?;
    }
    // Writes the header if there were no records.
    writer.into_inner()?.flush()?;
    Ok(())
}

fn named(codec: &str) -> Result<Codec, Box<dyn Error>> {
    Ok(match codec {
        "null" => Codec::Null,
        "deflate" => Codec::Deflate(DeflateSettings::default()),
        "snappy" => Codec::Snappy,
        "zstandard" => Codec::Zstandard(ZstandardSettings::default()),
        "bzip2" => Codec::Bzip2(Bzip2Settings::default()),
        "xz" => Codec::Xz(XzSettings::default()),
        other => return Err(format!("no codec is called {other}").into()),
    })
}
