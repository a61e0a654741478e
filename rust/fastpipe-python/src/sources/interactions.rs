//! Interactions as a data set: positives, and negatives that are sampled as they are read.

use std::sync::Arc;

use fastpipe_batch::{DType, Error, ErrorKind, try_collect, try_with_capacity};
use fastpipe_engine::default_threads;
use fastpipe_interactions::{InteractionsSource, Request, Sampler, Settings, is_full, sample_negatives, sample_unseen};
use fastpipe_memory::try_reserve_large;
use fastpipe_random::Key;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;
use crate::sources::data::Data;

/// Draws between two looks for Ctrl-C: some hundredths of a second.
const DRAWS_AT_ONCE: usize = 1 << 21;

/// What users have interacted with, sorted by user.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Positives {
    positives: Arc<fastpipe_interactions::Positives>,
}

#[pymethods]
impl Positives {
    #[new]
    fn new(
        py: Python<'_>,
        indptr: PyReadonlyArray1<'_, i64>,
        items: PyReadonlyArray1<'_, u32>,
        num_items: u64,
    ) -> PyResult<Self> {
        let (indptr, items) = (indptr.as_array(), items.as_array());
        let positives = py.detach(|| {
            let indptr = try_collect(indptr.iter().copied(), "users")?;
            let items = try_collect(items.iter().copied(), "positives")?;
            fastpipe_interactions::Positives::new(&indptr, items, num_items).map(Arc::new)
        });
        Ok(Positives {
            positives: positives.py(py)?,
        })
    }

    /// Users who have positives, and too few items besides to draw as many negatives from.
    #[pyo3(signature = (*, negatives, repeats=true, weights=None))]
    fn full_users<'py>(
        &self,
        py: Python<'py>,
        negatives: u32,
        repeats: bool,
        weights: Option<PyReadonlyArray1<'py, f64>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sampler = self.sampler(py, negatives, repeats, weights.as_ref())?;
        let positives = &self.positives;
        let full = py.detach(|| {
            let users = (0..positives.users()).filter(|&user| is_full(positives, &sampler, user));
            try_collect(users.map(i64::from), "users")
        });
        array(py, full.py(py)?)
    }

    /// The negatives of each positive in an epoch, as rows of an [`InteractionsDataset`] hold them.
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    #[pyo3(signature = (*, negatives, seed, epoch=0, first_positive=0, repeats=true, weights=None, num_threads=None))]
    fn sample_negatives<'py>(
        &self,
        py: Python<'py>,
        negatives: u32,
        seed: u64,
        epoch: u64,
        first_positive: u64,
        repeats: bool,
        weights: Option<PyReadonlyArray1<'py, f64>>,
        num_threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let sampler = self.sampler(py, negatives, repeats, weights.as_ref())?;
        let (positives, each) = (&self.positives, negatives as usize);
        let mut out = room(positives.len(), each).py(py)?;
        let at = (Key { seed, epoch }, first_positive);
        let threads = num_threads.unwrap_or_else(default_threads);
        py.detach(|| sample_negatives(positives, &sampler, at, threads, &mut out))
            .py(py)?;
        array(py, out)?.reshape([positives.len(), each])
    }

    /// Items that users haven't seen: `negatives` for each pair of a user and an item that counts as seen as well (-1
    /// for none). Request `i` draws what number `first + i` draws.
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    #[pyo3(signature = (users, exclude, *, negatives, seed, first=0, repeats=true, weights=None, num_threads=None))]
    fn sample_unseen<'py>(
        &self,
        py: Python<'py>,
        users: PyReadonlyArray1<'py, i64>,
        exclude: PyReadonlyArray1<'py, i64>,
        negatives: u32,
        seed: u64,
        first: u64,
        repeats: bool,
        weights: Option<PyReadonlyArray1<'py, f64>>,
        num_threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let sampler = self.sampler(py, negatives, repeats, weights.as_ref())?;
        let (users, exclude) = (users.as_array(), exclude.as_array());
        if users.len() != exclude.len() {
            let (users, exclude) = (users.len(), exclude.len());
            let reason = format!("expected as many items to exclude as users, found {exclude} and {users}");
            return Err(Error::new(ErrorKind::Shape, reason)).py(py);
        }
        let positives = &self.positives;
        let mut requests = try_with_capacity(users.len(), "requests").py(py)?;
        for (&user, &item) in users.iter().zip(exclude) {
            requests.push(request(positives, user, item).py(py)?);
        }
        let each = negatives as usize;
        let mut out = room(requests.len(), each).py(py)?;
        let threads = num_threads.unwrap_or_else(default_threads);
        let some = (DRAWS_AT_ONCE / each.max(1)).max(1);
        for (i, requests) in requests.chunks(some).enumerate() {
            let from = i * some;
            let out = &mut out[from * each..][..requests.len() * each];
            let first = first.wrapping_add(from as u64);
            py.detach(|| sample_unseen(positives, &sampler, requests, (seed, first), threads, out))
                .py(py)?;
            py.check_signals()?;
        }
        array(py, out)?.reshape([requests.len(), each])
    }
}

impl Positives {
    fn sampler(
        &self,
        py: Python<'_>,
        negatives: u32,
        repeats: bool,
        weights: Option<&PyReadonlyArray1<'_, f64>>,
    ) -> PyResult<Sampler> {
        let weights = weights.map(|weights| weights.as_array().to_vec());
        let num_items = self.positives.num_items();
        py.detach(|| Sampler::new(num_items, negatives, repeats, weights.as_deref()))
            .py(py)
    }
}

/// Room for this many times this many items.
fn room(times: usize, each: usize) -> Result<Vec<u32>, Error> {
    let (mut room, all) = (Vec::new(), times.saturating_mul(each));
    try_reserve_large(&mut room, all)
        .map_err(|_| Error::out_of_memory(all.saturating_mul(size_of::<u32>()), "the items that are drawn"))?;
    room.resize(all, 0);
    Ok(room)
}

fn request(positives: &fastpipe_interactions::Positives, user: i64, item: i64) -> Result<Request, Error> {
    let outside = |what, found, most| {
        let reason = format!("expected {what} below {most}, their number, found {found}");
        Error::new(ErrorKind::ValueRange, reason)
    };
    let within = |number: i64, most: u32| u32::try_from(number).ok().filter(|&number| number < most);
    let (users, items) = (positives.users(), positives.num_items());
    Ok(Request {
        user: within(user, users).ok_or_else(|| outside("users", user, users))?,
        exclude: match item {
            -1 => None,
            item => Some(within(item, items).ok_or_else(|| outside("items", item, items))?),
        },
    })
}

/// Positives, each with negatives that are sampled anew each epoch, ready to be read. Its units are shards of users.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct InteractionsDataset {
    source: Arc<InteractionsSource>,
}

#[pymethods]
impl InteractionsDataset {
    #[new]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    #[pyo3(signature = (
        positives, *, negatives, repeats=true, item_dtype="int32", label_dtype="int8", weights=None, skip_full=false,
        first_user=0, first_positive=0, shard_positives=None,
    ))]
    fn new(
        py: Python<'_>,
        positives: &Bound<'_, Positives>,
        negatives: u32,
        repeats: bool,
        item_dtype: &str,
        label_dtype: &str,
        weights: Option<PyReadonlyArray1<'_, f64>>,
        skip_full: bool,
        first_user: u32,
        first_positive: u64,
        shard_positives: Option<u64>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let positives = positives.get();
        let dtype = |name: &str| {
            DType::from_name(name).ok_or_else(|| PyValueError::new_err(format!("{name:?} is no dtype of a column")))
        };
        let settings = Settings {
            item_dtype: dtype(item_dtype)?,
            label_dtype: dtype(label_dtype)?,
            skip_full,
            first_user,
            first_positive,
            shard_positives,
        };
        let sampler = positives.sampler(py, negatives, repeats, weights.as_ref())?;
        let source = py.detach(|| InteractionsSource::new(positives.positives.clone(), sampler, settings));
        let source = Arc::new(source.py(py)?);
        let dataset = InteractionsDataset { source: source.clone() };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Where shards start, counted in users of these positives; and where the last one ends.
    fn shard_users<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let shards = self.source.shards();
        let ends = shards.iter().map(|shard| i64::from(shard.end_user));
        array(py, try_collect(std::iter::once(0).chain(ends), "shards").py(py)?)
    }

    /// The shard of a row of a unit, its user, its positive, counted over all of them, and whether it is that itself
    /// (0) or which of its negatives, from 1.
    fn place_of(&self, unit: u64, record: u32) -> PyResult<(u64, u32, u64, u32)> {
        let place = self.source.place_of(unit, record);
        let place = place.ok_or_else(|| PyIndexError::new_err(format!("there is no row {record} in shard {unit}")))?;
        Ok((place.shard, place.user, place.positive, place.draw))
    }
}
