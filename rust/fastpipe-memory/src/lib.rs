//! Memory: what programs may tell the processor and the system about it, without any change in what they compute (that
//! a table is large, and what of it is read next, while rows of it are copied or otherwise); how much there is; and
//! memory that several processes have in common.

mod arena;
mod copy;
pub mod futex;
mod lending;
mod machine;
mod pages;
mod prefetch;
mod reserve;
mod shared;

pub use arena::{Arena, Extent, HEAD, Recycler, Refused};
pub use copy::copy_and_prefetch;
pub use lending::{Borrowed, LABEL, Lendable, Lender};
pub use machine::{available_memory, machine_memory};
pub use pages::{LARGE_PAGE, advise, page_size, reserve_large, try_reserve_large, whole_pages};
pub use prefetch::{LINE, LINES, hint, prefetch_of};
pub use reserve::{Reserving, give_up_spare, put_spare_by, room_for};
pub use shared::SharedMemory;
