//! Memory: what programs may tell the processor and the system about it, without any change in what they compute (that
//! a table is large, and what of it is read next, while rows of it are copied or otherwise); how much there is; memory
//! that is got from the system and given back to it; and memory that several processes have in common.

mod arena;
mod copy;
pub mod futex;
mod left;
mod lending;
mod machine;
mod owned;
mod pages;
mod pieces;
mod prefetch;
mod region;
mod reserve;
mod shared;

pub use arena::{Arena, Extent, HEAD, Recycler, Refused};
pub use copy::copy_and_prefetch;
pub use left::{give_back, run_out};
pub use lending::{Borrowed, LABEL, Lendable, Lender};
pub use machine::{available_memory, machine_memory};
pub use owned::{ALIGNMENT, OwnedMemory};
pub use pages::{LARGE_PAGE, advise, page_size, reserve_large, try_reserve_large, whole_pages};
pub use pieces::Carver;
pub use prefetch::{LINE, LINES, hint, prefetch_of};
pub use region::Region;
pub use reserve::{Reserving, give_up_spare, put_spare_by, room_for};
pub use shared::SharedMemory;
