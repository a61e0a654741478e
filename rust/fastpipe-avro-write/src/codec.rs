//! Compresses blocks (Avro 1.12 specification, "Required Codecs" and "Optional Codecs").

use std::io::Write;

use fastpipe_avro::Codec;
use fastpipe_batch::{Error, ErrorKind, Result};

/// Returns the lowest, the default and the highest level, or `None` if the codec has no levels.
const fn levels(codec: Codec) -> Option<(i32, i32, i32)> {
    match codec {
        Codec::Null | Codec::Snappy => None,
        Codec::Deflate => Some((1, 6, 12)),
        Codec::Zstandard => Some((-7, 3, 22)),
        Codec::Bzip2 => Some((1, 9, 9)),
        Codec::Xz => Some((0, 6, 9)),
    }
}

/// A codec and its compression level.
#[derive(Clone, Copy, Debug)]
pub struct Compression {
    /// The codec.
    pub codec: Codec,
    level: i32,
}

impl Compression {
    /// Returns the codec with this name, at this level or its default level. The error is a message for the user.
    pub fn new(name: &str, level: Option<i32>) -> std::result::Result<Self, String> {
        let Some(codec) = Codec::ALL.into_iter().find(|codec| codec.name() == name) else {
            let names: Vec<_> = Codec::ALL.map(Codec::name).into();
            return Err(format!("codec must be one of {}; got {name:?}", names.join(", ")));
        };
        match (levels(codec), level) {
            (None, None) => Ok(Compression { codec, level: 0 }),
            (None, Some(level)) => Err(format!("codec {name} has no levels: leave out level={level}")),
            (Some((_, usual, _)), None) => Ok(Compression { codec, level: usual }),
            (Some((least, _, most)), Some(level)) if (least..=most).contains(&level) => {
                Ok(Compression { codec, level })
            }
            (Some((least, _, most)), Some(level)) => {
                Err(format!("level must be {least} to {most} for {name}; got {level}"))
            }
        }
    }
}

/// The reusable compressor of a thread.
pub(crate) enum Compressor {
    Null,
    Deflate(libdeflater::Compressor),
    Snappy(Box<snap::raw::Encoder>),
    Zstandard(zstd::bulk::Compressor<'static>),
    Bzip2(bzip2::Compression),
    Xz(u32),
}

#[cold]
fn failed(codec: Codec, error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("a block could not be compressed with {}: {error}", codec.name()),
    )
}

impl Compressor {
    pub(crate) fn new(compression: Compression) -> Result<Self> {
        let Compression { codec, level } = compression;
        Ok(match codec {
            Codec::Null => Compressor::Null,
            Codec::Deflate => {
                let level = libdeflater::CompressionLvl::new(level).map_err(|_| failed(codec, &"no such level"))?;
                Compressor::Deflate(libdeflater::Compressor::new(level))
            }
            Codec::Snappy => Compressor::Snappy(Box::new(snap::raw::Encoder::new())),
            Codec::Zstandard => {
                let made = zstd::bulk::Compressor::new(level).map_err(|error| failed(codec, &error))?;
                Compressor::Zstandard(made)
            }
            Codec::Bzip2 => Compressor::Bzip2(bzip2::Compression::new(level.unsigned_abs())),
            Codec::Xz => Compressor::Xz(level.unsigned_abs()),
        })
    }

    /// Compresses a block.
    pub(crate) fn compress(&mut self, data: Vec<u8>) -> Result<Vec<u8>> {
        match self {
            Compressor::Null => Ok(data),
            Compressor::Deflate(compressor) => {
                let mut out = vec![0; compressor.deflate_compress_bound(data.len())];
                let size = compressor.deflate_compress(&data, &mut out);
                out.truncate(size.map_err(|error| failed(Codec::Deflate, &error))?);
                Ok(out)
            }
            Compressor::Snappy(encoder) => {
                let mut out = encoder
                    .compress_vec(&data)
                    .map_err(|error| failed(Codec::Snappy, &error))?;
                out.extend_from_slice(&crc32fast::hash(&data).to_be_bytes());
                Ok(out)
            }
            Compressor::Zstandard(compressor) => compressor
                .compress(&data)
                .map_err(|error| failed(Codec::Zstandard, &error)),
            Compressor::Bzip2(level) => {
                let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), *level);
                let done = encoder.write_all(&data).and_then(|()| encoder.finish());
                done.map_err(|error| failed(Codec::Bzip2, &error))
            }
            Compressor::Xz(level) => {
                let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), *level);
                let done = encoder.write_all(&data).and_then(|()| encoder.finish());
                done.map_err(|error| failed(Codec::Xz, &error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_checked() {
        assert!(Compression::new("lz4", None).unwrap_err().contains("zstandard"));
        assert!(Compression::new("null", Some(1)).is_err());
        assert!(Compression::new("deflate", Some(0)).is_err());
        assert!(Compression::new("zstandard", Some(22)).is_ok());
        assert!(Compression::new("xz", Some(10)).is_err());
    }
}
