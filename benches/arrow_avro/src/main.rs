//! Reads Avro files with the arrow-avro crate and reports the time.
//!
//! A request is a line on stdin: the number of rows per batch, `keep` or `drop`, `views` or `copies` for strings, and
//! the path. The answer is a line on stdout: rows, seconds of wall time, seconds of CPU time. Opening the file is timed;
//! starting the process and, with `keep`, freeing the batches aren't.

use std::fs::File;
use std::io::{BufReader, Write, stdin, stdout};
use std::time::{Duration, Instant};

use arrow_avro::reader::ReaderBuilder;
use rustix::time::{ClockId, clock_gettime};

// The C library's allocator returns large buffers to the system, so each new one causes page faults. polars and
// polars-avro avoid this with their own allocators, too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Size of the read buffer in bytes. The 8 KB of `BufReader::new` are slower.
const BUFFER: usize = 1 << 20;

type Failure = Box<dyn std::error::Error>;

/// Returns the CPU time of this process in seconds.
fn spent() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).map_or(0.0, |time| time.as_secs_f64())
}

fn read(line: &str) -> Result<String, Failure> {
    let mut words = line.trim_end().splitn(4, ' ');
    let mut next = || {
        words
            .next()
            .ok_or("a request must be: rows per batch, keep or drop, views or copies, path")
    };
    let (batch, keep) = (next()?.parse::<usize>()?, next()? == "keep");
    let (views, path) = (next()? == "views", next()?);
    let before = spent();
    let began = Instant::now();
    let file = BufReader::with_capacity(BUFFER, File::open(path)?);
    let reader = ReaderBuilder::new()
        .with_batch_size(batch)
        .with_utf8_view(views)
        .build(file)?;
    let (mut rows, mut kept) = (0, Vec::new());
    for result in reader {
        let batch = result?;
        rows += batch.num_rows();
        if keep {
            kept.push(batch);
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    Ok(format!("{rows} {seconds} {}", spent() - before))
}

fn main() -> Result<(), Failure> {
    let mut line = String::new();
    while stdin().read_line(&mut line)? > 0 {
        let answer = read(&line).unwrap_or_else(|error| format!("error {error}"));
        writeln!(stdout(), "{answer}")?;
        line.clear();
    }
    Ok(())
}
