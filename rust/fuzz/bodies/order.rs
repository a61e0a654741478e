//! Plans orders over arbitrary row counts, settings and states. Planning must always end, either with batches or with
//! an error.
//!
//! The fuzz target `order` and a property test of `fastpipe-order` call this.

use std::sync::Arc;

use fastpipe_order::{Kind, Order, PartialChunk, Place, PlanError, Remaining, Settings, ShardBy, State, Uneven, Units};

/// Orders that declare more memory are skipped, because the engine rejects orders that exceed its limit.
const MOST_BYTES: u64 = 8 << 20;

/// The number of checks for cancellation until planning is cancelled. The time between two checks is a few hundredths
/// of a second.
const LOOKS: u32 = 3;

/// The number of consecutive batches to plan.
const BATCHES: usize = 3;

/// The rows of each unit, options, the shuffle buffer in batches or rows, the batch size, the seed, the rank and the
/// number of ranks, steps to seek, the numbers of a state, and its chunks and places.
pub(crate) type Input = (
    Vec<u32>,
    [u8; 5],
    u32,
    u32,
    u64,
    (u32, u32),
    Vec<u64>,
    [u64; 5],
    Vec<[u64; 3]>,
);

fn settings(input: &Input) -> Settings {
    let (_, choices, buffer, batch_size, seed, (rank, ranks), ..) = input;
    let kind = [Kind::Sequential, Kind::Window, Kind::Block, Kind::Buffer][usize::from(choices[0] % 4)];
    let streamed = matches!(kind, Kind::Block | Kind::Buffer);
    let batch_size = (batch_size % (1 << 31)).max(1);
    // The bindings apply the same bounds: windows contain whole batches.
    let buffer = u64::from(*buffer).clamp(1, 1 << 31);
    let ranks = u64::from(ranks % (1 << 20)).max(1);
    Settings {
        kind,
        batch_size,
        drop_last: choices[1].is_multiple_of(2),
        shuffle_buffer: if streamed {
            buffer
        } else {
            buffer.next_multiple_of(batch_size.into())
        },
        seed: *seed,
        rank: u64::from(*rank) % ranks,
        ranks,
        // 1 divides any number of ranks.
        in_step: choices[3].is_multiple_of(2).then_some(1),
        shard_by: match (choices[2].is_multiple_of(2), streamed) {
            (true, _) => ShardBy::Batch,
            (false, true) => ShardBy::Unit,
            (false, false) => ShardBy::Window,
        },
        on_uneven: [Uneven::Drop, Uneven::Pad, Uneven::Allow][usize::from(choices[3] % 3)],
        ..Settings::default()
    }
}

fn state(input: &Input) -> State {
    let (_, choices, .., numbers, lists) = input;
    let [epoch, step, ranks, taken, next] = *numbers;
    let open = |which: u64| {
        let of = lists.iter().filter(move |list| list[2] % 3 == which);
        of.map(|&[chunk, from, _]| PartialChunk { chunk, from }).collect()
    };
    let places = lists.iter().filter(|list| list[2] % 3 == 2);
    State {
        epoch,
        step,
        // The ranks are often equal. Otherwise, `resume` would reject nearly every state for its ranks and check
        // nothing else.
        ranks: if choices[4].is_multiple_of(2) {
            settings(input).ranks
        } else {
            ranks
        },
        remaining: Remaining {
            partial: open(0),
            deferred: open(1),
            next,
        },
        taken,
        places: places
            .map(|&[window, unit, record]| {
                (
                    window,
                    Place {
                        unit,
                        record: record as u32,
                    },
                )
            })
            .collect(),
    }
}

/// Whether a batch was planned. The caller has checked the required memory, so planning must not run out of memory.
fn planned(result: Option<Result<fastpipe_order::BatchPlan, PlanError>>, total: u64) -> bool {
    match result {
        None | Some(Err(PlanError::Interrupted)) => false,
        Some(Err(error)) => panic!("{error}, although the declared memory fits"),
        Some(Ok(plan)) => {
            assert_eq!(plan.content.len(), plan.rows as usize);
            assert!(plan.valid <= plan.rows && u64::from(plan.valid) <= total);
            let slots = [0, plan.rows as usize / 2, (plan.rows as usize).saturating_sub(1)];
            assert!(plan.rows == 0 || slots.iter().all(|&slot| plan.content.at(slot).is_some()));
            true
        }
    }
}

/// Plans batches at some steps, and after a state. Returns the declared maximum memory in bytes, or `None` if it
/// exceeds the limit.
pub(crate) fn run(input: &Input) -> Option<u64> {
    let settings = settings(input);
    let units = Arc::new(Units::new(input.0.iter().copied()).ok()?);
    let order = Arc::new(Order::new(&units, settings.clone()).expect("a list of ranks should fit into memory"));
    let steps = order.steps();
    let state = state(input);
    let memory = order.planning_memory(settings.shuffle_buffer, true);
    // This covers the state's own lists, and a few more of the same size.
    let resuming = order.resuming_memory(&state);
    if memory.max(resuming) > MOST_BYTES {
        return None;
    }
    let mut looks = 0;
    let mut stop = || {
        looks += 1;
        looks >= LOOKS
    };
    let mut cursor = order
        .epoch(input.4 % (1 << 53))
        .expect("a table of units should fit into memory");
    let chosen = input.6.iter().take(4).map(|step| step % steps.max(1));
    for step in chosen.chain([0, steps.saturating_sub(1)]).collect::<Vec<_>>() {
        cursor.seek(step).expect("seeking should need no memory");
        for _ in 0..BATCHES {
            if !planned(cursor.next_unless(&mut stop), units.total()) {
                break;
            }
        }
    }
    drop(cursor);
    if let Ok(mut cursor) = order.resume(&state) {
        for _ in 0..BATCHES {
            if !planned(cursor.next_unless(&mut stop), units.total()) {
                break;
            }
        }
        cursor.state().expect("a few places should fit into memory");
    }
    Some(memory.saturating_add(resuming))
}
