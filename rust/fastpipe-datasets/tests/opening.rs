//! Tests of opening small files.

use std::convert::Infallible;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use fastpipe_batch::{BufferPool, Contents, ErrorKind, Feature, FileStamp, Pass, Result, Source, Stored};
use fastpipe_csv::{Dialect, OnRagged};
use fastpipe_datasets::{
    AvroFiles, AvroReport, ChecksummedAvro, CsvFiles, CsvReservoir, UnscannedCsv, default_window, read_vocabulary,
    window_rows,
};
use fastpipe_files::{CacheOutcome, Files, Halt, IndexCache, Opening, open_all};
use fastpipe_order::{Settings, Units};

const SYNC: [u8; 16] = [0xa5; 16];
const HOW: Opening<'_> = Opening {
    contents: &[],
    cache: None,
    tolerant: false,
    threads: 2,
};

fn never(_: u64) -> Result<(), Infallible> {
    Ok(())
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> Arc<str> {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().into()
}

fn rows(source: &dyn Source) -> Vec<u32> {
    (0..source.units()).map(|unit| source.describe(unit).rows).collect()
}

fn names(features: &[Feature]) -> Vec<&str> {
    features.iter().map(|feature| &*feature.name).collect()
}

/// Returns a container file of blocks with these row counts. Each record is a long below 64, which is encoded in one
/// byte.
fn avro(field: &str, blocks: &[u8]) -> Vec<u8> {
    let schema =
        format!(r#"{{"type": "record", "name": "R", "fields": [{{"name": "{field}", "type": "long"}}]}}"#).into_bytes();
    let long = |value: usize| [value as u8 * 2 % 128 + 128 * u8::from(value > 63), (value / 64) as u8];
    let mut out = b"Obj\x01\x02\x16avro.schema".to_vec();
    out.extend(long(schema.len()));
    out.extend([&schema[..], b"\0", &SYNC].concat());
    for &rows in blocks {
        out.extend([rows * 2, rows * 2]);
        out.extend((0..rows).map(|i| i * 2));
        out.extend(SYNC);
    }
    out
}

fn opened(paths: &[Arc<str>], how: Opening<'_>) -> (AvroFiles, AvroReport) {
    AvroFiles::open(paths, how, None, true, &mut never).unwrap_or_else(|halt| panic!("{halt:?}"))
}

#[test]
fn avro_files_are_units_of_records() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [("a", "x", &[5, 7][..]), ("b", "x", &[1]), ("c", "y", &[2])]
        .map(|(name, field, blocks)| written(folder.path(), name, &avro(field, blocks)));
    let (mut files, report) = opened(&paths, HOW);
    assert!(report.failed.is_none() && report.damage.is_empty());
    // The first file of each schema.
    let first: Vec<_> = report.schemas.iter().map(|(path, _)| path).collect();
    assert_eq!(first, [&paths[0], &paths[2]]);
    let (some, _) = opened(&paths[..2], HOW);
    let inferred = some.infer(None, &mut never).unwrap();
    assert_eq!(names(&inferred.features), ["x"]);
    assert_eq!(rows(&some.source(&inferred.features).unwrap()), [5, 7, 1]);
    // The last file lacks the field.
    let lacks = files.source(&inferred.features).err().unwrap();
    assert_eq!(
        (lacks.kind(), &lacks.location().path),
        (ErrorKind::Schema, &Some(paths[2].clone()))
    );
    files.merge().unwrap();
    let merged = files.infer(None, &mut never).unwrap();
    assert_eq!(names(&merged.features), ["x", "y"]);
    assert_eq!(rows(&files.source(&merged.features).unwrap()), [5, 7, 1, 2]);
}

#[test]
fn tolerated_damage_drops_the_rows_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut cut = avro("x", &[5, 7]);
    cut.truncate(cut.len() - 20);
    let paths = [
        written(folder.path(), "cut", &cut),
        written(folder.path(), "whole", &avro("x", &[3])),
    ];
    let (_, report) = opened(&paths, HOW);
    assert_eq!(report.failed.unwrap().location().path.as_ref(), Some(&paths[0]));
    let how = Opening { tolerant: true, ..HOW };
    let (files, report) = opened(&paths, how);
    assert_eq!((report.failed.is_none(), report.damage.len()), (true, 1));
    assert_eq!(rows(&files.source(&[]).unwrap()), [5, 3]);
}

#[test]
fn the_caller_can_cancel() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), "a", &avro("x", &[5]));
    let ended = AvroFiles::open(&[path], HOW, None, true, &mut |_| Err("enough"));
    assert!(matches!(ended, Err(Halt::Interrupted("enough"))));
}

/// A remote file.
#[derive(Debug)]
struct Far(Vec<u8>);

impl Stored for Far {
    fn location(&self) -> &str {
        "http://far/x.avro"
    }

    fn stamp(&self) -> FileStamp {
        let size = self.0.len() as u64;
        FileStamp { size, modified: 0 }
    }

    fn version(&self) -> &str {
        "1"
    }

    fn read_at(&self, offset: u64, out: &mut [u8], _cancelled: &dyn Fn() -> bool) -> Result<usize> {
        let rest = &self.0[offset as usize..];
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}

#[test]
fn remote_files_have_checksums_too() {
    let folder = tempfile::tempdir().unwrap();
    let cache = IndexCache::open(folder.path()).unwrap();
    let paths = [Arc::from("http://far/x.avro")];
    // Small, and larger than the head of the file that is buffered.
    for blocks in [&[5, 7][..], &[60; 2000]] {
        let bytes = avro("x", blocks);
        let mut flipped = bytes.clone();
        // The last value of the last block.
        flipped[bytes.len() - SYNC.len() - 1] ^= 2;
        let errors = [bytes, flipped].map(|bytes| {
            let contents = [Some(Contents::Remote(Arc::new(Far(bytes))))];
            let how = Opening {
                contents: &contents,
                cache: Some(&cache),
                ..HOW
            };
            let found = open_all(&ChecksummedAvro::default(), &paths, how, &mut never);
            let (found, failed) = found.unwrap_or_else(|halt| panic!("{halt:?}"));
            let kept = found[0].opened.as_ref().map(|opened| opened.kept);
            let (files, _) = opened(&paths, how);
            let source = files.source(&[]).unwrap();
            assert!(failed.is_none() && source.has_checksums());
            let (read, pool) = (Files::of(source.facts()), BufferPool::default());
            let open = |unit: u64| {
                let bytes = read.read(source.describe(unit).range.unwrap(), &pool)?;
                source.open(unit, Pass::default(), bytes.into(), &pool).map(drop)
            };
            let failed = (0..source.units()).filter_map(|unit| Some((unit, open(unit).err()?.kind())));
            (kept, failed.collect::<Vec<_>>())
        });
        let last = blocks.len() as u64 - 1;
        assert_eq!(errors[0], (Some(CacheOutcome::Stored), Vec::new()));
        assert_eq!(errors[1], (Some(CacheOutcome::Hit), vec![(last, ErrorKind::Malformed)]));
    }
}

fn dialect() -> Dialect {
    Dialect {
        null_values: vec![Vec::new()],
        ..Dialect::default()
    }
}

/// Returns rows with a newline within quotes. The last row contains a null.
fn csv(rows: usize) -> String {
    let mut text = "id,text,score\n".to_owned();
    for i in 1..rows {
        text += &format!("{i},\"line {i}\nand more\",{i}\n");
    }
    text + &format!("{rows},last,\n")
}

fn csv_files(paths: &[Arc<str>], how: Opening<'_>) -> CsvFiles {
    let opened = CsvFiles::open(dialect(), paths, how, true, &mut never);
    opened.unwrap_or_else(|halt| panic!("{halt:?}")).0
}

#[test]
fn compressed_files_are_read_like_plain_ones() {
    let folder = tempfile::tempdir().unwrap();
    let text = csv(10_000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    let plain = written(folder.path(), "a.csv", text.as_bytes());
    let packed = written(folder.path(), "a.csv.gz", &gzip.finish().unwrap());
    let (plain, packed) = (csv_files(&[plain], HOW), csv_files(&[packed], HOW));
    let features = plain.infer(None, &mut never).unwrap().0;
    assert_eq!(names(&features), ["id", "text", "score"]);
    // The null is the last of all values, but it is found.
    assert_eq!(features[2].nulls, fastpipe_batch::Nulls::Mask);
    assert_eq!(packed.infer(None, &mut never).unwrap().0, features);
    let source = Arc::new(plain.source(&features).unwrap());
    assert!(source.units() > 1);
    assert_eq!(rows(&*source).iter().sum::<u32>(), 10_000);
    assert!(plain.compressed(&source, 2).is_none());
    let text = Arc::new(packed.source(&features).unwrap());
    let compressed = packed.compressed(&text, 2).unwrap();
    assert_eq!(rows(&compressed), rows(&*source));
}

#[test]
fn ragged_rows_are_counted_by_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    // The rows of 25 MiB are several regions, which threads scan in parallel.
    let rows = 250_000;
    let mut text = "id,text\n".to_owned();
    for i in 0..rows {
        let end = if i % 7 == 0 { ",more" } else { "" };
        text += &format!("{i},\"line {i}\nand {}\"{end}\n", "x,y\n".repeat(i % 40));
    }
    let path = written(folder.path(), "a.csv", text.as_bytes());
    let dialect = Dialect {
        on_ragged: OnRagged::Skip,
        ..dialect()
    };
    for threads in [1, 2, 5] {
        let how = Opening { threads, ..HOW };
        let opened = CsvFiles::open(dialect.clone(), std::slice::from_ref(&path), how, false, &mut never);
        let files = opened.unwrap_or_else(|halt| panic!("{halt:?}")).0;
        let skipped = rows.div_ceil(7) as u64;
        assert_eq!(files.skipped_rows(), skipped);
        let kept = self::rows(&files.source(&[]).unwrap())
            .into_iter()
            .map(u64::from)
            .sum::<u64>();
        assert_eq!(kept + skipped, rows as u64);
    }
}

#[test]
fn a_cached_index_equals_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), "a.csv", csv(50_000).as_bytes());
    // A file that was just written isn't indexed, so change its modification time.
    let file = std::fs::File::options().write(true).open(&*path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let cache = IndexCache::open(&folder.path().join("cache")).unwrap();
    let how = Opening {
        cache: Some(&cache),
        ..HOW
    };
    let open = || csv_files(std::slice::from_ref(&path), how);
    let (first, again) = (open(), open());
    assert_eq!(std::fs::read_dir(folder.path().join("cache")).unwrap().count(), 1);
    assert_eq!(first.files()[0].chunks, again.files()[0].chunks);
    assert_eq!(
        first.infer(None, &mut never).unwrap().0,
        again.infer(None, &mut never).unwrap().0
    );
}

#[test]
fn rows_at_random_bytes_are_rows_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = csv(1000);
    let path = written(folder.path(), "a.csv", text.as_bytes());
    let (files, _) = UnscannedCsv::open(dialect(), &[path], HOW, &mut never).unwrap();
    let draw = |rows, replace| files.sample(rows, replace, 7, &mut never).unwrap();
    let drawn = draw(100, false).unwrap();
    assert!(drawn.offsets.is_sorted_by(|a, b| a < b), "no row is drawn twice");
    let begins = |&offset: &i64| text[offset as usize..].starts_with(|c: char| c.is_ascii_digit());
    assert!(drawn.offsets.iter().all(begins));
    assert_eq!(rows(&drawn.rows.source(&[]).unwrap()).iter().sum::<u32>(), 100);
    let (rows, low, high) = drawn.estimate;
    assert!(low < rows && rows < high && low < 1000.0 && 1000.0 < high);
    assert!(draw(2000, false).is_err_and(|reason| reason.contains("method=\"exact\"")));
    assert_eq!(draw(2000, true).unwrap().files.len(), 2000);
}

#[test]
fn a_stream_is_sampled_piece_by_piece() {
    let text = csv(1000);
    let sample = |piece: usize| {
        let mut reservoir = CsvReservoir::new("-".into(), dialect(), Vec::new(), 20, 3, None);
        for piece in text.as_bytes().chunks(piece) {
            reservoir.push(piece).unwrap();
        }
        assert_eq!(reservoir.end().unwrap(), (1000, 0));
        reservoir.take().unwrap()
    };
    let ((files, numbers), (_, again)) = (sample(7), sample(1 << 20));
    assert_eq!((numbers.len(), &numbers), (20, &again));
    assert!(numbers.is_sorted_by(|a, b| a < b) && numbers[19] < 1000);
    assert_eq!(rows(&files.source(&[]).unwrap()).iter().sum::<u32>(), 20);
    let mut small = CsvReservoir::new("-".into(), dialect(), Vec::new(), 20, 3, Some(10));
    assert_eq!(small.push(text.as_bytes()).unwrap_err().kind(), ErrorKind::Limit);
}

#[test]
fn windows_have_sixteen_batches_or_sixty_four_units() {
    let units = Units::new([10, 20, 30]).unwrap();
    assert_eq!(default_window(&units, None, 100), 1600);
    assert_eq!(default_window(&units, None, 1), 64 * 20);
    // There was one unit before it was split.
    assert_eq!(default_window(&units, Some(1), 1), 64 * 60);
    assert_eq!(default_window(&Units::new([]).unwrap(), None, u64::MAX), 1 << 31);
    let settings = |kind: &str| {
        Settings::from_json(&format!(
            r#"{{"shuffle": "{kind}", "batch_size": 8, "drop_last": false, "shuffle_buffer": 20, "seed": 0, "rank": 0,
                 "world_size": 1, "shard_by": "batch", "on_uneven": "allow", "in_step": null, "skipped": 0}}"#
        ))
    };
    assert_eq!(window_rows(&settings("window").unwrap()), 24);
    assert_eq!(window_rows(&settings("buffer").unwrap()), 20);
}

#[test]
fn vocabularies_have_one_key_per_line() {
    let folder = tempfile::tempdir().unwrap();
    let read = |text: &[u8]| read_vocabulary(&written(folder.path(), "keys", text), &mut never);
    let keys = read(b"a\r\nb\n\nc\n").unwrap();
    let keys: Vec<_> = keys.iter().map(|(key, index)| (key.to_vec(), index)).collect();
    assert_eq!(
        keys,
        [
            (b"a".to_vec(), 0),
            (b"b".to_vec(), 1),
            (Vec::new(), 2),
            (b"c".to_vec(), 3)
        ]
    );
    let reason = |text| match read(text) {
        Err(Halt::Failed(error)) => error.reason().to_string(),
        _ => panic!("the file was read"),
    };
    assert!(reason(b"a\nb\na").contains("found \"a\" on line 1 and on line 3"));
    assert!(reason(b"\x1f\x8b...").contains("compressed by gzip"));
}
