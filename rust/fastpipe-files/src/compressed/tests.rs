use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_batch::{ByteRange, Error, ErrorKind, ReadAt, Result, SourceFacts, Work};
use proptest::prelude::*;

use super::*;
use crate::storage::SourceFile;

/// Bytes in memory that count how many of them are read.
struct Counted {
    bytes: Vec<u8>,
    read: AtomicU64,
}

impl Counted {
    fn new(bytes: Vec<u8>) -> Counted {
        Counted {
            bytes,
            read: AtomicU64::new(0),
        }
    }
}

impl ReadAt for Counted {
    fn location(&self) -> &str {
        "memory"
    }

    fn size(&self) -> Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.bytes.get(offset..));
        let found = from.unwrap_or_default();
        let n = found.len().min(out.len());
        out[..n].copy_from_slice(&found[..n]);
        self.read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// Returns a gzip member with the given optional header fields.
fn member(text: &[u8], level: u32, fields: u8) -> Vec<u8> {
    let mut deflater = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::new(level));
    deflater.write_all(text).unwrap();
    let mut out = vec![0x1f, 0x8b, 8, fields, 1, 2, 3, 4, 0, 3];
    if fields & 4 != 0 {
        out.extend([3, 0, 7, 8, 9]);
    }
    for flag in [8, 16] {
        if fields & flag != 0 {
            out.extend(b"a name\0");
        }
    }
    if fields & 2 != 0 {
        out.extend([5, 6]);
    }
    out.extend(deflater.finish().unwrap());
    out.extend(crc32fast::hash(text).to_le_bytes());
    out.extend((text.len() as u32).to_le_bytes());
    out
}

fn frame(text: &[u8], checksum: bool) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(checksum).unwrap();
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn skippable(len: usize) -> Vec<u8> {
    [
        &[0x53, 0x2a, 0x4d, 0x18],
        &(len as u32).to_le_bytes()[..],
        &vec![0xfd; len],
    ]
    .concat()
}

/// Returns text that doesn't compress to almost nothing.
fn text(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        b'a' + (state >> 60) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn whole(file: &dyn ReadAt) -> Result<Vec<u8>> {
    let mut start = [0; Compression::MAGIC_BYTES];
    let found = file.read_at(0, &mut start)?;
    let compression = Compression::of(&start[..found]).expect("it is compressed");
    let text = CompressedText::new(file, compression);
    let (mut out, mut piece) = (Vec::new(), [0; 5000]);
    loop {
        let found = text.read_at(out.len() as u64, &mut piece)?;
        out.extend(&piece[..found]);
        if found < piece.len() {
            assert_eq!(text.size().unwrap(), out.len() as u64);
            return Ok(out);
        }
    }
}

fn refused(bytes: Vec<u8>) -> Error {
    whole(&Counted::new(bytes)).expect_err("it was read")
}

/// A text, and its compressed form as a random sequence of parts.
fn parts() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let cuts = proptest::collection::vec((0usize..90_000, 0u32..10, 0u8..32), 1..8);
    (cuts, any::<bool>()).prop_map(|(cuts, zstandard)| {
        let text = text(cuts.iter().map(|(len, ..)| len).sum());
        let (mut packed, mut at) = (Vec::new(), 0);
        for (len, level, fields) in cuts {
            let part = &text[at..at + len];
            at += len;
            if zstandard {
                packed.extend(
                    skippable(usize::from(fields & 3) * 40_000)
                        .into_iter()
                        .take_while(|_| fields & 1 > 0),
                );
                packed.extend(frame(part, fields & 2 > 0));
            } else {
                packed.extend(member(part, level, fields));
            }
        }
        (text, packed)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_reads_are_of_the_text(
        (text, packed) in parts(),
        reads in proptest::collection::vec((0usize..700_000, 0usize..100_000), 0..20),
    ) {
        let compression = Compression::of(&packed).unwrap();
        prop_assert_eq!(&whole(&Counted::new(packed.clone())).unwrap(), &text);
        let file = Counted::new(packed.clone());
        let unknown = CompressedText::new(&file, compression);
        for &(offset, len) in &reads {
            let mut out = vec![0; len];
            let found = unknown.read_at(offset as u64, &mut out).unwrap();
            let from = text.get(offset..).unwrap_or_default();
            prop_assert_eq!(&out[..found], &from[..from.len().min(len)]);
        }
        prop_assert_eq!(unknown.size().unwrap(), text.len() as u64);
        let layout = unknown.take_layout().unwrap();
        let kept = [layout.encode().unwrap(), vec![9]].concat();
        let (layout, rest) = Layout::decode(&kept, packed.len() as u64).unwrap();
        prop_assert_eq!((rest, layout.size()), (&[9][..], text.len() as u64));
        prop_assert!(layout.is_framed());

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, &packed).unwrap();
        let path: Arc<str> = path.to_str().unwrap().into();
        let stamps = vec![SourceFile::open(&path).unwrap().stamp().unwrap()];
        let source = SourceFacts { stamps, locations: vec![path], ..SourceFacts::new([], "one file", Work::default()) };
        let files = TextFiles::of(&source, [Some(Packed { compression, layout: layout.into() })].into());
        for (offset, len) in reads {
            let (offset, end) = (offset.min(text.len()), (offset + len).min(text.len()));
            let range = ByteRange { location: 0, offset: offset as u64, len: (end - offset) as u64 };
            prop_assert_eq!(&files.read(range, &|| false).unwrap()[..], &text[offset..end]);
        }
    }

    #[test]
    fn damage_is_an_error_or_the_text(
        (text, packed) in parts(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let mut damaged = packed.clone();
        let at = at.index(packed.len());
        if cut { damaged.truncate(at) } else { damaged[at] = to }
        if Compression::of(&damaged).is_some()
            && let Ok(found) = whole(&Counted::new(damaged.clone()))
        {
            // Frames without a checksum can't detect damage, and a cut between two parts can't be detected at all.
            let noticed = Compression::of(&packed) == Some(Compression::Gzip) && !cut;
            prop_assert!(found == text || (!noticed || text.starts_with(&found)));
        }
    }

    #[test]
    fn any_bytes_are_text_or_an_error(bytes in any::<Vec<u8>>(), zstandard in any::<bool>()) {
        let magic: &[u8] = if zstandard { &[0x28, 0xb5, 0x2f, 0xfd] } else { &[0x1f, 0x8b, 8, 0] };
        let _ = whole(&Counted::new([magic, &bytes].concat()));
        let _ = Layout::decode(&bytes, 1000);
    }
}

#[test]
fn sequential_reads_decompress_once() {
    let text = text(3 << 20);
    for packed in [member(&text, 1, 0), frame(&text, true)] {
        let file = Counted::new(packed.clone());
        assert_eq!(whole(&file).unwrap(), text);
        assert_eq!(file.read.load(Ordering::Relaxed), packed.len() as u64 + 4);
    }
}

#[test]
fn random_reads_decompress_from_the_nearest_restart_point() {
    let text = text(1 << 20);
    let packed: Vec<u8> = text.chunks(64 << 10).flat_map(|part| member(part, 1, 0)).collect();
    let file = Counted::new(packed);
    let found = CompressedText::new(&file, Compression::Gzip);
    assert_eq!(found.size().unwrap(), 1 << 20);
    let layout = found.take_layout().unwrap();
    assert_eq!((layout.widest_gap(), layout.gap(70 << 10)), (64 << 10, 64 << 10));
    assert_eq!(layout.before((64 << 10) - 1), Point::default());
    assert_eq!(layout.before(64 << 10).decompressed, 64 << 10);
    // A random read decompresses at most the member before its position.
    let before = file.read.load(Ordering::Relaxed);
    let known = CompressedText::new(&file, Compression::Gzip);
    known.size().unwrap();
    let opened = file.read.load(Ordering::Relaxed) - before;
    for i in (0..16).rev() {
        known.read_at((i << 16) + 100, &mut [0; 10]).unwrap();
    }
    let random = file.read.load(Ordering::Relaxed) - before - opened;
    // Each of the sixteen decoders reads one chunk.
    assert!(random <= 16 * (64 << 10), "{random}");
}

#[test]
fn restart_points_have_a_minimum_distance() {
    let tiny: Vec<u8> = text(200_000).chunks(1000).flat_map(|part| member(part, 1, 0)).collect();
    let file = Counted::new(tiny);
    let found = CompressedText::new(&file, Compression::Gzip);
    found.size().unwrap();
    let layout = found.take_layout().unwrap();
    assert_eq!(layout.widest_gap(), 33_000);
    assert!(layout.encode().unwrap().len() < 60);
    let wide = Layout::new(layout::Points::default(), MOST_GAP + 1);
    assert!(!wide.is_framed() && Layout::new(layout::Points::default(), MOST_GAP).is_framed());
}

#[test]
fn empty_members_and_padding_are_skipped() {
    let nothing = member(b"", 6, 0);
    let many = [
        nothing.repeat(10_000),
        member(b"text", 6, 8),
        nothing.repeat(3),
        vec![0; 200_000],
    ]
    .concat();
    assert_eq!(whole(&Counted::new(many)).unwrap(), b"text");
    let many = [
        skippable(0).repeat(1000),
        frame(b"", true).repeat(1000),
        frame(b"text", true),
    ]
    .concat();
    assert_eq!(whole(&Counted::new(many)).unwrap(), b"text");
}

#[test]
fn errors_name_the_byte_of_the_file() {
    let (gz, zst) = (member(b"some text", 6, 0), frame(b"some text", true));
    let at = |error: &Error| (error.kind(), error.location().offset);
    let malformed = |offset: usize| (ErrorKind::Malformed, Some(offset as u64));
    for sound in [&gz, &zst] {
        let error = refused([&sound[..], b"more"].concat());
        assert_eq!(at(&error), malformed(sound.len()));
        assert!(error.reason().contains("found something else"), "{error}");
        assert_eq!(error.location().path.as_deref(), Some("memory"));
        for end in 5..sound.len() {
            let error = refused(sound[..end].to_vec());
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.reason().contains("cut short"), "{end}: {error}");
        }
    }
    let mut wrong = gz.clone();
    let end = wrong.len();
    wrong[end - 5] ^= 1;
    assert!(refused(wrong.clone()).reason().contains("expected checksum"));
    wrong[end - 5] ^= 1;
    wrong[end - 1] ^= 1;
    assert!(refused(wrong).reason().contains("bytes in a member"));
    let mut wrong = gz.clone();
    wrong[2] = 7;
    assert!(refused(wrong).reason().contains("found method 7"));
    let mut wrong = gz;
    wrong[3] = 0x80;
    assert!(refused(wrong).reason().contains("reserved flags"));
    let mut wrong = zst;
    let end = wrong.len();
    wrong[end - 1] ^= 1;
    assert!(refused(wrong).reason().contains("damaged"));
    let beyond = [&skippable(100)[..], &[0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff]].concat();
    assert!(refused(beyond).reason().contains("cut short"));
}

#[test]
fn dictionaries_and_large_windows_are_refused() {
    // A frame that declares a window of 2^28 bytes and contains nothing else.
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0, (28 - 10) << 3, 1, 0, 0];
    let error = refused(window.to_vec());
    assert_eq!(error.kind(), ErrorKind::Limit);
    assert!(error.reason().contains("--long=27"), "{error}");
    let dictionary = [0x28, 0xb5, 0x2f, 0xfd, 0x21, 77, 3, 0x19, 0, 0, b'a', b'b', b'c'];
    let error = refused(dictionary.to_vec());
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.reason().contains("dictionary 77"), "{error}");
}

#[test]
fn impossible_layouts_are_refused() {
    let points = |steps: &[(u64, u64)]| {
        let kept = [
            vec![1, 100, steps.len() as u8],
            steps.iter().flat_map(|s| [s.0 as u8, s.1 as u8]).collect(),
        ];
        Layout::decode(&kept.concat(), 50).map(|(layout, _)| layout.size())
    };
    assert_eq!(points(&[(20, 40), (30, 60)]).unwrap(), 100);
    for wrong in [
        &[(0, 40)][..],
        &[(20, 0)],
        &[(51, 1)],
        &[(1, 101)],
        &[(20, 40), (31, 1)],
    ] {
        assert!(points(wrong).is_err());
    }
    assert!(Layout::decode(&[2, 100, 0], 50).is_err());
    assert!(Layout::decode(&[1, 100, 9], 50).is_err());
}
