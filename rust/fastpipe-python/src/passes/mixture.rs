//! Mixtures: the units of several datasets as one dataset, with the order of their rows.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Source, Union, UnionMember, try_collect};
use fastpipe_engine::{Lease, PassSource, unplanned};
use fastpipe_order::{Mixture, MixtureError, Stop};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::IntoPy;
use crate::passes::order::Order;
use crate::sources::data::{Begin, Data, Mixed};

/// Creates the dataset of a mixture. Each phase has its first row and its shares. Of every `sum(shares)` rows from
/// there on, `shares[k]` come from the dataset of `orders[k]`, in that order. An epoch has `rows` rows; None means
/// until the first order is exhausted or, with `all_exhausted`, until each one was exhausted once. With a seed, the
/// orders of rows are drawn at random.
#[pyfunction]
#[pyo3(signature = (orders, phases, *, all_exhausted=false, rows=None, seed=None))]
pub(crate) fn mix_orders(
    py: Python<'_>,
    orders: Vec<Py<Order>>,
    phases: Vec<(u64, Vec<u64>)>,
    all_exhausted: bool,
    rows: Option<u64>,
    seed: Option<u64>,
) -> PyResult<Py<Data>> {
    let stop = match rows {
        Some(rows) => Stop::Rows(rows),
        None if all_exhausted => Stop::AllExhausted,
        None => Stop::FirstExhausted,
    };
    let plans: Vec<_> = orders.iter().map(|order| order.get().planned().clone()).collect();
    let mut interrupt = None;
    let mut stop_planning = || {
        interrupt = Python::attach(|py| py.check_signals()).err();
        interrupt.is_some()
    };
    let mixture = py.detach(|| Mixture::new(&plans, &phases, stop, seed, &mut stop_planning));
    if let Some(interrupt) = interrupt {
        return Err(interrupt);
    }
    let mixture = match mixture {
        Ok(mixture) => Arc::new(mixture),
        Err(MixtureError::Plan(error)) => return Err(unplanned(error)).py(py),
        Err(MixtureError::Never(reader)) => {
            return Err(PyValueError::new_err(format!(
                "the weight of reader {reader} is 0 before all its rows have occurred: raise its last weight, or pass a \
                 number of rows as stop"
            )));
        }
        Err(error @ MixtureError::TooLong) => return Err(Error::new(ErrorKind::Limit, error.to_string())).py(py),
        Err(error) => return Err(Error::new(ErrorKind::Internal, error.to_string())).py(py),
    };
    let seeds: Vec<u64> = plans.iter().map(|order| order.settings().seed).collect();
    let datas: Vec<Py<Data>> = orders.iter().map(|order| order.get().data().clone_ref(py)).collect();
    let sources = datas.iter().map(|data| data.get().source().clone());
    let union = Arc::new(union_of(sources.collect(), &seeds, &mixture).py(py)?);
    let begin: Option<Begin> = datas.iter().any(|data| data.get().begins()).then(|| {
        let mixture = mixture.clone();
        let begin: Begin = Box::new(move |py| {
            let (mut sources, mut leases): (Vec<Arc<dyn Source>>, Vec<Lease>) = (Vec::new(), Vec::new());
            for data in &datas {
                let begun = data.get().begin(py, false)?;
                sources.push(begun.source);
                leases.extend(begun.lease);
            }
            Ok(PassSource {
                source: Arc::new(union_of(sources, &seeds, &mixture).py(py)?),
                lease: Some(Arc::new(leases)),
            })
        });
        begin
    });
    Py::new(py, Data::of_mixture(union.clone(), begin, Mixed { mixture, union }))
}

/// Returns the source of a mixture.
fn union_of(sources: Vec<Arc<dyn Source>>, seeds: &[u64], mixture: &Mixture) -> Result<Union, Error> {
    let members = sources
        .into_iter()
        .zip(seeds)
        .enumerate()
        .map(|(index, (source, &seed))| {
            let (units, passes) = mixture.member(index).unwrap_or_default();
            UnionMember {
                source,
                units,
                passes,
                seed,
            }
        });
    Union::new(try_collect(members, "the readers of a mixture")?)
}
