//! What programs may tell the processor and the system about memory, without any change in what they compute: that a
//! table is large, and what of it is read next, while rows of it are copied or otherwise.

mod copy;
mod pages;
mod prefetch;
mod reserve;

pub use copy::copy_and_prefetch;
pub use pages::{LARGE_PAGE, advise, page_size, reserve_large, try_reserve_large, whole_pages};
pub use prefetch::{LINE, LINES, hint, prefetch_of};
pub use reserve::{Reserving, give_up_spare, put_spare_by, room_for};
