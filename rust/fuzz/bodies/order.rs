//! Orders over counts, settings and states of any kind. Whatever they are, planning ends: in batches, or in an error.
//!
//! The fuzz target `order` calls this, and so does a property test of `fastpipe-order`.

use std::sync::Arc;

use fastpipe_order::{Kind, Order, PartialChunk, Place, PlanError, Remaining, Settings, ShardBy, State, Uneven, Units};

/// Orders that say they take more are left, as the engine leaves those that take more than it allows.
const MOST_BYTES: u64 = 8 << 20;

/// Looks at whether to go on until it isn't: some hundredths of a second each.
const LOOKS: u32 = 3;

/// Batches that are planned in a row.
const BATCHES: usize = 3;

/// Rows of units; choices; shuffle buffer in batches or rows; batch size; seed; rank and ranks; steps to go to; a
/// state's numbers, and its chunks and places.
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
    // As the bindings bound them: windows hold whole batches.
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
        // A divisor of them.
        in_step: choices[3].is_multiple_of(2).then_some(1),
        shard_by: match (choices[2].is_multiple_of(2), streamed) {
            (true, _) => ShardBy::Batch,
            (false, true) => ShardBy::Unit,
            (false, false) => ShardBy::Window,
        },
        uneven: [Uneven::Drop, Uneven::Pad, Uneven::Allow][usize::from(choices[3] % 3)],
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
        // Often the same, or nothing else would be looked at.
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

/// Whether it was planned; memory is bounded by what is looked at before.
fn planned(result: Option<Result<fastpipe_order::BatchPlan, PlanError>>, total: u64) -> bool {
    match result {
        None | Some(Err(PlanError::Interrupted)) => false,
        Some(Err(error)) => panic!("{error}, which was to fit"),
        Some(Ok(plan)) => {
            assert_eq!(plan.content.len(), plan.rows as usize);
            assert!(plan.valid <= plan.rows && u64::from(plan.valid) <= total);
            let slots = [0, plan.rows as usize / 2, (plan.rows as usize).saturating_sub(1)];
            assert!(plan.rows == 0 || slots.iter().all(|&slot| plan.content.at(slot).is_some()));
            true
        }
    }
}

/// Plans batches at some steps, and behind some state. Says what it was to take at most; `None` if that was too much.
pub(crate) fn run(input: &Input) -> Option<u64> {
    let settings = settings(input);
    let units = Arc::new(Units::new(input.0.iter().copied()).ok()?);
    let order = Arc::new(Order::new(&units, settings).expect("a list of ranks"));
    let steps = order.steps();
    let state = state(input);
    let memory = order.planning_memory(settings.shuffle_buffer, true);
    // For the state's own lists, and a few more of them.
    let resuming = order.resuming_memory(&state);
    if memory.max(resuming) > MOST_BYTES {
        return None;
    }
    let mut looks = 0;
    let mut stop = || {
        looks += 1;
        looks >= LOOKS
    };
    let mut cursor = order.epoch(input.4 % (1 << 53)).expect("a table of units");
    let chosen = input.6.iter().take(4).map(|step| step % steps.max(1));
    for step in chosen.chain([0, steps.saturating_sub(1)]).collect::<Vec<_>>() {
        cursor.seek(step).expect("no memory is needed");
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
        cursor.state().expect("a few places");
    }
    Some(memory.saturating_add(resuming))
}
