//! A dataset in other processes, as a source from which this process reads no units.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, ByteRange, ColumnSpec, Error, ErrorKind, Fetched, Pass, Result, Row, Sink, Source, SourceFacts, Unit,
    UnitInfo, Unpicked, Work,
};

/// The units of a dataset that other processes read. Only their row counts are known, which is all that orders need.
pub struct RemoteUnits {
    facts: SourceFacts,
    /// The columns if sparse columns use the layout of Arrow.
    csr: Option<Arc<[ColumnSpec]>>,
    rows: Arc<[u32]>,
    /// The reason why units can't be read in any order, if they can't.
    in_sequence: Option<Arc<str>>,
}

impl RemoteUnits {
    /// Creates units with these columns and row counts. `csr` contains the columns in the layout of Arrow, if there are
    /// sparse ones. `in_sequence` is the reason why units can't be read in any order, if they can't.
    pub fn new(
        columns: Vec<ColumnSpec>,
        csr: Option<Vec<ColumnSpec>>,
        rows: Vec<u32>,
        in_sequence: Option<&str>,
    ) -> RemoteUnits {
        let work = Work {
            open: "receiving",
            place: "checking",
        };
        RemoteUnits {
            facts: SourceFacts::new(columns, "received", work),
            csr: csr.map(Arc::from),
            rows: rows.into(),
            in_sequence: in_sequence.map(Arc::from),
        }
    }
}

fn elsewhere() -> Error {
    Error::new(
        ErrorKind::Internal,
        "units of other processes can't be read in this process",
    )
}

impl Source for RemoteUnits {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        if !self.facts.columns.iter().any(ColumnSpec::is_coo) {
            return Ok(None);
        }
        let Some(columns) = self.csr.clone() else {
            let reason = "the server supports sparse columns only with layout=\"coo\"";
            return Err(Error::new(ErrorKind::Unsupported, reason));
        };
        Ok(Some(Arc::new(RemoteUnits {
            facts: SourceFacts {
                columns,
                ..self.facts.clone()
            },
            csr: None,
            rows: self.rows.clone(),
            in_sequence: self.in_sequence.clone(),
        })))
    }

    fn units(&self) -> u64 {
        self.rows.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let rows = usize::try_from(unit).ok().and_then(|unit| self.rows.get(unit));
        UnitInfo {
            rows: rows.copied().unwrap_or_default(),
            range: None::<ByteRange>,
            class: 0,
            apart: false,
            held: None,
        }
    }

    fn check_random(&self) -> Result<()> {
        match &self.in_sequence {
            None => Ok(()),
            Some(reason) => Err(Error::new(ErrorKind::Unsupported, &**reason)),
        }
    }

    fn open(&self, _: u64, _: Pass, _: Fetched, _: &BufferPool) -> Result<Box<dyn Unit>> {
        Err(elsewhere())
    }

    fn pick(&self, _: &[&dyn Unit], _: &[Row], slots: Range<usize>, _: &mut Sink<'_>) -> Result<(), Unpicked> {
        Err(Unpicked {
            slot: slots.start,
            error: elsewhere(),
        })
    }

    fn locate(&self, _: u64, error: Error) -> Error {
        error
    }
}
