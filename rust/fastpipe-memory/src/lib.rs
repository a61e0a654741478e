//! Low-level memory management:
//!
//! - hints that don't change results: large pages for large tables, and prefetching, for example while rows are copied
//! - the amount of memory that the machine has, and how much of it is available
//! - memory that is mapped from the system and returned to it
//! - memory that several processes share

mod arena;
mod copy;
pub mod futex;
mod lending;
mod machine;
mod oom_reserve;
mod owned;
mod page_runs;
mod pages;
mod prefetch;
mod recycler;
mod region;
mod retained_pages;
mod shared;

pub use arena::{Arena, Extent, HEAD, Refused};
pub use copy::copy_and_prefetch;
pub use lending::{Borrowed, LABEL, Lendable, Lender};
pub use machine::{available_memory, machine_memory};
pub use oom_reserve::{ReserveAllocator, release_address_space, reserve_address_space, room_for};
pub use owned::{ALIGNMENT, OwnedMemory};
pub use page_runs::HugePageArena;
pub use pages::{LARGE_PAGE, advise, page_size, reserve_large, try_reserve_large, whole_pages};
pub use prefetch::{LINE, LINES, hint, prefetch_of};
pub use recycler::{PageLocks, Recycler};
pub use region::Region;
pub use retained_pages::{on_allocation_failure, release_all};
pub use shared::SharedMemory;
