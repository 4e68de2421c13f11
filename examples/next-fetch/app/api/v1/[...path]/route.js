import { intake } from '../../../../lib/shop.js'

const tickets = intake.fetchTickets()

export { tickets as DELETE, tickets as GET, tickets as POST }
