//! Interactions as a dataset: positives, and negatives that are sampled during reading.

use std::sync::Arc;

use fastpipe_batch::{DType, Error, ErrorKind, try_collect, try_with_capacity};
use fastpipe_engine::default_threads;
use fastpipe_interactions::{InteractionsSource, Request, Sampler, Settings, is_full, sample_negatives, sample_unseen};
use fastpipe_memory::try_reserve_large;
use fastpipe_random::Key;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;
use crate::sources::data::Data;

/// Number of draws between two checks for Ctrl-C. They take a few hundredths of a second.
const DRAWS_AT_ONCE: usize = 1 << 21;

/// Options from Python's `NegativeSampling`.
#[derive(FromPyObject)]
struct NegativeSampling<'py> {
    negatives: u32,
    repeats: bool,
    weights: Option<PyReadonlyArray1<'py, f64>>,
}

/// The items that each user has interacted with, sorted by user.
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

    /// Returns the users with positives for whom too few other items are left to draw the negatives.
    fn full_users<'py>(&self, py: Python<'py>, sampling: NegativeSampling<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let sampler = self.sampler(py, &sampling)?;
        let positives = &self.positives;
        let full = py.detach(|| {
            let users = (0..positives.users()).filter(|&user| is_full(positives, &sampler, user));
            try_collect(users.map(i64::from), "users")
        });
        array(py, full.py(py)?)
    }

    /// Returns the negatives of each positive in epoch 0. They are the negatives that rows of an
    /// [`InteractionsDataset`] contain.
    #[pyo3(signature = (sampling, *, seed, num_threads=None))]
    fn sample_negatives<'py>(
        &self,
        py: Python<'py>,
        sampling: NegativeSampling<'py>,
        seed: u64,
        num_threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let sampler = self.sampler(py, &sampling)?;
        let (positives, each) = (&self.positives, sampling.negatives as usize);
        let mut out = room(positives.len(), each).py(py)?;
        let at = (Key { seed, epoch: 0 }, 0);
        let threads = num_threads.unwrap_or_else(default_threads);
        py.detach(|| sample_negatives(positives, &sampler, at, threads, &mut out))
            .py(py)?;
        array(py, out)?.reshape([positives.len(), each])
    }

    /// Returns items that the users haven't seen. For each user, `exclude` is one more item that counts as seen (-1 for
    /// none).
    #[pyo3(signature = (users, exclude, sampling, *, seed))]
    fn sample_unseen<'py>(
        &self,
        py: Python<'py>,
        users: PyReadonlyArray1<'py, i64>,
        exclude: PyReadonlyArray1<'py, i64>,
        sampling: NegativeSampling<'py>,
        seed: u64,
    ) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let sampler = self.sampler(py, &sampling)?;
        let (users, exclude) = (users.as_array(), exclude.as_array());
        if users.len() != exclude.len() {
            let (users, exclude) = (users.len(), exclude.len());
            let reason = format!("exclude must have one item per user; got {exclude} items for {users} users");
            return Err(Error::new(ErrorKind::Shape, reason)).py(py);
        }
        let positives = &self.positives;
        let mut requests = try_with_capacity(users.len(), "requests").py(py)?;
        for (&user, &item) in users.iter().zip(exclude) {
            requests.push(request(positives, user, item).py(py)?);
        }
        let each = sampling.negatives as usize;
        let mut out = room(requests.len(), each).py(py)?;
        let threads = default_threads();
        let some = (DRAWS_AT_ONCE / each.max(1)).max(1);
        for (i, requests) in requests.chunks(some).enumerate() {
            let from = i * some;
            let out = &mut out[from * each..][..requests.len() * each];
            py.detach(|| sample_unseen(positives, &sampler, requests, (seed, from as u64), threads, out))
                .py(py)?;
            py.check_signals()?;
        }
        array(py, out)?.reshape([requests.len(), each])
    }
}

impl Positives {
    fn sampler(&self, py: Python<'_>, sampling: &NegativeSampling<'_>) -> PyResult<Sampler> {
        let weights = sampling.weights.as_ref().map(|weights| weights.as_array().to_vec());
        let (num_items, negatives, repeats) = (self.positives.num_items(), sampling.negatives, sampling.repeats);
        py.detach(|| Sampler::new(num_items, negatives, repeats, weights.as_deref()))
            .py(py)
    }
}

/// Allocates space for `times * each` items.
fn room(times: usize, each: usize) -> Result<Vec<u32>, Error> {
    let (mut room, all) = (Vec::new(), times.saturating_mul(each));
    try_reserve_large(&mut room, all)
        .map_err(|_| Error::out_of_memory(all.saturating_mul(size_of::<u32>()), "the drawn items"))?;
    room.resize(all, 0);
    Ok(room)
}

fn request(positives: &fastpipe_interactions::Positives, user: i64, item: i64) -> Result<Request, Error> {
    let outside = |what, found, most| {
        let reason = format!("expected {what} below {most}, the number of {what}; found {found}");
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

/// Positives, each with negatives that are sampled again in each epoch. The units are shards of users.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct InteractionsDataset {
    source: Arc<InteractionsSource>,
}

#[pymethods]
impl InteractionsDataset {
    /// `dtypes` are the dtypes of the columns `item` and `label`. `first` contains the numbers of users and positives
    /// in earlier shards.
    #[new]
    #[pyo3(signature = (positives, sampling, *, dtypes, skip_full, first))]
    fn new(
        py: Python<'_>,
        positives: &Bound<'_, Positives>,
        sampling: NegativeSampling<'_>,
        dtypes: [PyBackedStr; 2],
        skip_full: bool,
        first: (u32, u64),
    ) -> PyResult<PyClassInitializer<Self>> {
        let positives = positives.get();
        let dtype =
            |name: &str| DType::from_name(name).ok_or_else(|| PyValueError::new_err(format!("unknown dtype {name:?}")));
        let settings = Settings {
            item_dtype: dtype(&dtypes[0])?,
            label_dtype: dtype(&dtypes[1])?,
            skip_full,
            first_user: first.0,
            first_positive: first.1,
            ..Settings::default()
        };
        let sampler = positives.sampler(py, &sampling)?;
        let source = py.detach(|| InteractionsSource::new(positives.positives.clone(), sampler, settings));
        let source = Arc::new(source.py(py)?);
        let dataset = InteractionsDataset { source: source.clone() };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Returns the index of each shard's first user among these positives, followed by the end of the last shard.
    fn shard_users<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let shards = self.source.shards();
        let ends = shards.iter().map(|shard| i64::from(shard.end_user));
        array(py, try_collect(std::iter::once(0).chain(ends), "shards").py(py)?)
    }

    /// Returns the shard, the user and the positive of a row of a unit. The positive is counted over all shards. The
    /// last element is 0 for the positive itself, or the index of its negative, from 1.
    fn place_of(&self, unit: u64, record: u32) -> PyResult<(u64, u32, u64, u32)> {
        let place = self.source.place_of(unit, record);
        let place =
            place.ok_or_else(|| PyIndexError::new_err(format!("row {record} does not exist in shard {unit}")))?;
        Ok((place.shard, place.user, place.positive, place.draw))
    }
}
