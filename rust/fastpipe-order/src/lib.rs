//! Which rows stand in which batch.
#![forbid(unsafe_code)]

mod cursor;
mod deal;
mod permutation;
mod plan;
mod random;
mod sequential;
mod sliding;
mod units;
mod window;

pub use cursor::{BatchPlan, Cursor, Kind, Order, Settings, ShardBy, State, StateError, Uneven};
pub use deal::{Left, Open};
pub use plan::{Content, Picks, Row, Run};
pub use random::{Draws, Key, Purpose, below, philox};
pub use units::{TooLong, Units};
pub use window::Place;
